"""The end of ``ninfer-jax demo``: a conversation is saved, the engine stopped, another one goes on with it.

Owns that one scene. The conversation is the caller's; saving and restoring are the engine's public API.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ninfer_jax.engine import Engine
    from ninfer_jax.sampling_params import SamplingParams

NEXT_WORDS = "Is that the end?"


def stop_and_go_on(
    engine: Engine,
    reopen: Callable[[], Engine],
    name: str,
    history: Sequence[dict[str, str]],
    sampling: SamplingParams,
) -> dict[str, Any]:
    """Returns what one more turn took after a restart; the engine given is closed, the new one as well.

    Args:
        engine: idle.
        reopen: returns a new engine with the same options.
        name: session of the conversation.
        history: messages, the user's last.
        sampling: of both turns.
    """
    with tempfile.TemporaryDirectory(prefix="ninfer-demo-") as folder:
        said = engine.submit(list(history), sampling=sampling, session=name).result()
        engine.save_session(name, Path(folder) / "session")
        engine.close()
        started = time.perf_counter()
        with reopen() as again:
            restart_s = time.perf_counter() - started
            restored = again.restore_session(Path(folder) / "session", session=name)
            longer = [
                *history,
                {"role": "assistant", "content": said.text},
                {"role": "user", "content": NEXT_WORDS},
            ]
            answer = again.submit(longer, sampling=sampling, session=name).result()
    record = answer.materialization
    assert record is not None, "an answered request was admitted"
    return {
        "conversation": name,
        "user": NEXT_WORDS,
        "answer": answer.text.strip(),
        "restart_s": round(restart_s, 1),
        "restored_tokens": restored.tokens,
        "restored_checkpoints": len(restored.kept),
        "reused_tokens": record.reused_tokens,
        "computed_tokens": record.prefill_tokens,
        "source": record.source,
    }
