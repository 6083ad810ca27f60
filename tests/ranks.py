"""Worker processes that the whole test session shares.

Starting eight Python processes that import torch costs more than most tests, so they start
once and are handed functions: ``run(4, function, *args)`` runs ``function`` on a fresh world
of four ranks and returns the four results. A rank that raises fails the test with its
traceback; one that hangs is killed, and the next call starts new processes.
"""

from __future__ import annotations

from fsdp_tp.parity import Workers

# The modelling code too: every new process would import it again.
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_PRELOAD = ["tests.models", *(f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES)]

workers = Workers(collective_timeout=60, call_timeout=300, preload=_PRELOAD)
run = workers.run
stop = workers.stop
