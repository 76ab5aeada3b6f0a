"""These tests run kernels in Triton's interpreter, in a process of their own: see ../test_triton_interpreted.py."""

import os

collect_ignore_glob: list[str] = []
if os.environ.get("TRITON_INTERPRET") == "1":
    from support.models import triton_interpreter

    triton_interpreter.install()
else:
    collect_ignore_glob.append("*")  # the wrapper test runs them
