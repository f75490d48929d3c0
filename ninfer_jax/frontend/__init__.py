"""Messages to prompt identity, tokens to text. Knows no scheduler, page or device."""
