"""Answer prompts: their KV comes from a prefiller, the tokens are generated here.

python run_decode.py "Why is the sky blue?"
python run_decode.py "Why is the sky blue?" --prefill 127.0.0.1:7400
python run_decode.py --check 127.0.0.1:7400
"""

from disagg.serve.exits import interruptible, run_script


def main() -> int:
    """Parse the flags, read the prompts, then load what takes seconds to load."""
    from disagg.serve.check import check
    from disagg.serve.options import decode_parser
    from disagg.serve.prompts import read_prompts

    arguments = decode_parser().parse_args()
    if arguments.check is not None:
        interruptible(verbose=arguments.verbose)
        return check(arguments)
    prompts = read_prompts(arguments)
    from disagg.serve.commands import answer_prompts

    interruptible(verbose=arguments.verbose)
    return answer_prompts(arguments, prompts)


if __name__ == "__main__":
    run_script(main)
