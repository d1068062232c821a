"""The command ``python -m kda``. Each command is a module here with ``arguments(parser)`` and ``run(options)``, which
returns the exit status. ``import kda`` loads nothing of this."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import kda

COMMANDS = {
    "info": "what was built and what it finds on this machine",
    "check": "test the installed library against its float64 oracle",
    "bench": "measure the operators beside the ceilings of this machine",
    "explain": "which implementation would run a shape, and why not the others",
    "config": "options of compilers and linkers for C and C++ programs",
    "plugs": "which engines (FLA, SGLang, vLLM) are installed and run on kda, and why others do not",
}


INTERRUPTED = 130  # exit statuses, as shells give them for SIGINT and SIGPIPE
BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0: done. 1: the check failed, or no implementation takes the call. 2: wrong arguments; the message says
    which. 130: interrupted. 141: the reader of standard output is gone."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m kda",
        usage="python -m kda command [options]",
        description="Kimi Delta Attention on CPUs and NVIDIA GPUs.",
        epilog="\n".join(["commands:", *(f"  {name:<8} {what}" for name, what in COMMANDS.items())])
        + "\n\npython -m kda command --help tells the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help=f"one of {', '.join(COMMANDS)}")
    parser.add_argument("--version", action="version", version=f"kda {kda.__version__}")
    name = parser.parse_args(words[:1]).command
    module = importlib.import_module(f".{name}", __name__)
    parser = argparse.ArgumentParser(
        prog=f"python -m kda {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.arguments(parser)
    options = parser.parse_args(words[1:])
    if getattr(options, "threads", None):  # OpenMP and BLAS read it once, when they are loaded
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    try:
        status: int = module.run(options)
        sys.stdout.flush()  # here, where a broken pipe can be caught
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        return BROKEN_PIPE
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        print(f"python -m kda {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
