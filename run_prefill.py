"""Start a prefiller: a node that computes prompts' KV caches and writes them into decoders' memory.

python run_prefill.py --listen 127.0.0.1:7400
"""

from disagg.serve.exits import interruptible, run_script


def main() -> int:
    """Parse the flags and look at the port, then load what takes seconds to load."""
    from disagg.serve.options import check_port, prefill_parser

    arguments = prefill_parser().parse_args()
    check_port(*arguments.listen)
    from disagg.serve.commands import serve_prefill

    interruptible(verbose=arguments.verbose)
    return serve_prefill(arguments)


if __name__ == "__main__":
    run_script(main)
