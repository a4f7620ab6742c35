"""`python -m forwardscope`: the console command `forwardscope`."""

from runpy import run_module

if __name__ == "__main__":
    run_module("service", run_name="__main__")
