"""The command line: ds-lightning train | check | export | doctor."""

import importlib
import sys
from collections.abc import Sequence

# The value is the help line; the module of the same name has `run(arguments) -> exit code`. Modules
# are imported when their command runs, so that --help does not wait for torch.
COMMANDS = {
    "train": "train a model; Hydra overrides follow (zero=stage3 trainer.max_steps=50)",
    "check": "explain a ds_config.json key by key",
    "export": "make a checkpoint into one Lightning file, or into weights for torch and Hugging Face",
    "doctor": "show versions, devices and native code, and what to do about what is missing",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 found problems, 2 wrong usage."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        from ds_lightning.config.suggest import did_you_mean

        guess = did_you_mean(command, COMMANDS)
        print(
            f"ds-lightning: no command '{command}'{'; ' + guess if guess else ''}\n\n{_usage()}",
            file=sys.stderr,
        )
        return 2
    from ds_lightning.cli.errors import user_errors

    with user_errors() as outcome:
        outcome.code = importlib.import_module(f"ds_lightning.cli.{command}").run(rest)
    return outcome.code


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: ds-lightning COMMAND ...", "", *lines])
