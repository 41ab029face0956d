"""Python runs this at startup. After torch is imported, it has no cuDNN or CUPTI, and with SOFTGPU_EMULATE, ATen's
operations are computed."""

import importlib.util
import os
import sys
from types import ModuleType
from typing import Any


class AfterTorch:
    """Finds torch as usual, once, and adds to its import."""

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        usual = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            usual(module)
            module.backends.cuda.enable_cudnn_sdp(False)
            profiler = module.autograd.profiler
            profiler._supported_activities = lambda: {profiler.ProfilerActivity.CPU}  # GPUs are timed by events
            if os.environ.get("SOFTGPU_EMULATE"):
                import emulate

                emulate.install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AfterTorch())  # type: ignore[arg-type]
