"""The command ``python -m kda``. Each command is a module here with ``arguments(parser)`` and ``run(options)``, which
returns the exit status. ``import kda`` loads nothing of this."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

import kda

COMMANDS = {
    "info": "what was built and what it finds on this machine",
    "check": "test the installed library against its float64 oracle",
    "bench": "measure prefill, training and decode beside the ceilings of this machine",
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
    set_threads(words)
    module = importlib.import_module(f".{name}", __name__)
    parser = argparse.ArgumentParser(
        prog=f"python -m kda {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.arguments(parser)
    options = parser.parse_args(words[1:])
    return status_of(f"python -m kda {name}", lambda: module.run(options))


def set_threads(words: Sequence[str]) -> None:
    """Before anything is imported: OpenMP and BLAS read the number once, when they are loaded."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--threads", nargs="?")
    threads = parser.parse_known_args(words)[0].threads
    if threads and threads.isdecimal():
        os.environ["OMP_NUM_THREADS"] = threads


def status_of(name: str, run: Callable[[], int]) -> int:
    """Runs a command and returns its exit status; an error that a user can mend is a sentence."""
    try:
        status = run()
        sys.stdout.flush()  # here, where a broken pipe can be caught
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        return BROKEN_PIPE
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
