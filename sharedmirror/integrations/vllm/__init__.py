"""sharedmirror as the host tier of vLLM's prefix cache.

``SharedMirrorOffloadingSpec`` is loaded by vLLM's offloading connector (``spec_name``,
``spec_module_path``). ``SharedMirrorConnector`` (``kv_connector``, ``kv_connector_module_path``) is that
connector with one difference: a load that fails ends in recomputation, not in a dead engine.

vLLM calls its offloading interface experimental, so the versions this was tested with are checked here,
before anything of it is imported.
"""

from __future__ import annotations

import os
import warnings

import vllm

TESTED_VLLM = ("0.32",)
"""Releases of vLLM, without the patch number, that the tests run with."""
ANY_VERSION_VARIABLE = "SHAREDMIRROR_ANY_VLLM"


def check_version(version: str) -> None:
    """Raise ImportError, with the remedy, for a vLLM that this was not tested with."""
    release = ".".join(version.split("+")[0].split(".")[:2])
    if release in TESTED_VLLM:
        return
    message = (
        f"sharedmirror.integrations.vllm was tested with vLLM {', '.join(TESTED_VLLM)}; this is {version}. vLLM's "
        f"offloading interface changes between releases: install a tested one, or set {ANY_VERSION_VARIABLE}=1 to try"
    )
    if os.environ.get(ANY_VERSION_VARIABLE) != "1":
        raise ImportError(message)
    warnings.warn(message, stacklevel=2)


check_version(vllm.__version__)

from sharedmirror.integrations.vllm.connector import SharedMirrorConnector  # noqa: E402
from sharedmirror.integrations.vllm.spec import SharedMirrorOffloadingSpec  # noqa: E402

__all__ = ["TESTED_VLLM", "SharedMirrorConnector", "SharedMirrorOffloadingSpec", "check_version"]
