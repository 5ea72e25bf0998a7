"""python -m kv_cache: the kinds of KV cache; the same as python -m compare caches."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["caches"]
    runpy.run_module("compare.__main__", run_name="__main__", alter_sys=True)
