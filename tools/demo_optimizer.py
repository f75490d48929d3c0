"""How the weights of the embedded model move: Muon for matrices, AdamW for the rest, and the schedule of
both.

Owns the optimizer's choices. The loss and the data are elsewhere.
"""

from collections.abc import Mapping

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

# Per-element RMS of a matrix update is PEAK_RATE * 0.2: the usual size for Muon at this width.
PEAK_RATE = 6e-3
ADAM_SHARE = 0.5
WARM_UP_STEPS = 20
HIDDEN_MATRICES = ("qkv", "in_proj", "out_proj", "gate_up", "down")


def make_optimizer() -> optax.GradientTransformation:
    """Returns the transformation at rate one; the step multiplies by `rate_at`, so that decay can begin at
    any time.

    A run of this size sees about three million tokens, where orthogonalised updates need a good third fewer
    of them
    than AdamW for the same loss. The embedding (tied, so also the head), the short convolutions and all
    vectors stay with AdamW: they are no maps between hidden spaces.
    """

    def dimension_numbers(params: Mapping[str, jax.Array]) -> dict[str, MuonDimensionNumbers | None]:
        return {path: MuonDimensionNumbers() if is_hidden_matrix(path) else None for path in params}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            learning_rate=1.0,
            ns_steps=4,
            beta=0.95,
            weight_decay=0.02,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=dimension_numbers,
            adam_learning_rate=ADAM_SHARE,
            adam_b1=0.9,
            adam_b2=0.98,
        ),
    )


def is_hidden_matrix(path: str) -> bool:
    """Returns whether the parameter at a dotted module path maps one hidden space to another."""
    return path.rpartition(".")[2] in HIDDEN_MATRICES


def rate_at(step: int, num_steps: int, decay_steps: int, peak: float = PEAK_RATE) -> float:
    """Returns the rate of a step: a short rise, a plateau, and a straight decay to zero over the last
    `decay_steps`.

    Nothing before the decay depends on `num_steps`: a run may be continued with another end.
    """
    rise = min(1.0, (step + 1) / WARM_UP_STEPS)
    fall = min(1.0, (num_steps - step) / decay_steps)
    return peak * rise * fall
