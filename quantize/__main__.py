"""python -m quantize: the quantization schemes; the same as python -m compare schemes."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["schemes"]
    runpy.run_module("compare.__main__", run_name="__main__", alter_sys=True)
