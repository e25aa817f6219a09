"""``python -m lightning_boost``: Lightning's command line for this package's model and data, and its own commands."""

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from lightning_boost.callbacks.online_rms_norm_verifier import OnlineRMSNormVerifier
from lightning_boost.callbacks.run_summary import RunSummary
from lightning_boost.callbacks.token_throughput import TokenThroughput
from lightning_boost.commands.benchmark import BENCHMARKS
from lightning_boost.commands.checkpoint import export, inspect_checkpoint, verify
from lightning_boost.commands.convert import convert
from lightning_boost.commands.generate import generate_text
from lightning_boost.commands.parity import parity
from lightning_boost.data_module import TextDataModule
from lightning_boost.language_model import LowRankLanguageModel
from lightning_boost.new_directory import set_aside
from lightning_boost.strategy.boost import BoostParallelStrategy

COMMANDS: dict[str, Callable[..., int]] = {
    "parity": parity,
    **{f"benchmark {name}": command for name, command in BENCHMARKS.items()},
    "convert": convert,
    "generate": generate_text,
    "checkpoint inspect": inspect_checkpoint,
    "checkpoint verify": verify,
    "checkpoint export": export,
}
"""Commands beside Lightning's; each returns the exit code."""

PROGRAM = "python -m lightning_boost"

DESCRIPTION = (
    "Train low-rank language models. Beside the subcommands below: "
    + ", ".join(f"{name} ({inspect.getdoc(command).partition(chr(10))[0]})" for name, command in COMMANDS.items())  # type: ignore[union-attr]
)

_UNKNOWN_OPTION = re.compile(r"(?:does not accept option|Option) '([^']+)'|[Uu]nrecognized arguments: --([^\s=]+)")
_FAILED_CLASS = re.compile(r"^( *).*Problem with given class_path '([^']+)':\n((?:\1 {3,}.*\n)+)", re.MULTILINE)
_FAILED_OBJECT = re.compile(r"Errors:\n +- ((?:.*\n)+?) +- Not a valid subclass of ")
_NAMED_IN_RECIPES = (BoostParallelStrategy, OnlineRMSNormVerifier, RunSummary, TokenThroughput)


class _Parser(LightningArgumentParser):
    """Reports a wrong option in one sentence, with the nearest right one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # an abbreviation would take a misspelt option for another one
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    @override
    def add_class_arguments(self, theclass: Any, *args: Any, **kwargs: Any) -> list[str]:
        # the path of a tokenizer.json would be opened, and what it holds taken for options
        reads_files = kwargs.get("sub_configs", False) and theclass is not TextDataModule
        added: list[str] = super().add_class_arguments(theclass, *args, **{**kwargs, "sub_configs": reads_files})
        return added

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        message = _cause(message)
        unknown = _UNKNOWN_OPTION.search(message)
        if unknown:
            message += self._nearest(unknown[1] or unknown[2], getattr(ex, "subcommand_parser", None) or self)
        program = self.prog.replace(" [options]", "")
        # parsers of nested classes are named after the file that runs
        program = program if program.startswith(PROGRAM) else PROGRAM
        sys.stderr.write(f"error: {message}\nAll options: {program} --help\n")
        self.exit(2)
        raise AssertionError

    @staticmethod
    def _nearest(name: str, parser: ArgumentParser) -> str:
        known = {action.dest for action in parser._actions}
        for component in _NAMED_IN_RECIPES:
            known |= set(inspect.signature(component).parameters)
        near = get_close_matches(name, known, n=1) or get_close_matches(name.rpartition(".")[2], known, n=1)
        return f". Did you mean {near[0]!r}?" if near else ""


class BoostCLI(LightningCLI):
    """``fit``, ``validate``, ``test`` and ``predict``; wrong values are told in one sentence before anything starts."""

    @override
    def _parse_ckpt_path(self) -> None:
        # Lightning would read the hyper-parameters of a file; a checkpoint here is a directory
        return

    @override
    def instantiate_classes(self) -> None:
        """Build model, data and Trainer."""
        try:
            super().instantiate_classes()
        except (ValueError, OSError) as error:
            self._refuse(_cause(str(error)))

    def _refuse(self, error: Exception | str) -> NoReturn:
        assert self.subcommand is not None
        self._subcommand_parsers[self.subcommand].error(str(error))
        raise AssertionError

    def _check(self) -> None:
        strategy, checkpoint = self.trainer.strategy, self.config[self.subcommand].get("ckpt_path")
        try:
            self.model.check_vocabulary(self.datamodule)
            if self.subcommand == "fit":
                self.datamodule.check_ends(self.trainer)
            if isinstance(strategy, BoostParallelStrategy):
                strategy.connect(self.model)
                strategy.check_before_start(self.trainer)
            # what cannot be read is told here, once, and not by each process later
            self.datamodule.setup(self.subcommand)
        except ValueError as error:
            self._refuse(error)
        if checkpoint not in (None, "best", "last", "hpc", "registry") and not _is_there(Path(checkpoint)):
            is_file = "is a single file, and must be a directory that this strategy saved"
            self._refuse(f"ckpt_path ({checkpoint}) {is_file if Path(checkpoint).exists() else 'does not exist'}.")

    before_fit = before_validate = before_test = before_predict = _check


def _is_there(checkpoint: Path) -> bool:
    return checkpoint.is_dir() or set_aside(checkpoint).is_dir()


def _cause(message: str) -> str:
    """Return the part that tells why a class could not be built, without the other types that would also do there."""
    failed = _FAILED_CLASS.search(message)
    if failed:
        return f"{failed[2]} cannot be used: {' '.join(failed[3].split())}"
    failed = _FAILED_OBJECT.search(message)
    return " ".join(failed[1].split()) if failed else message


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ``None`` takes the process's arguments."""
    # Lightning 2.6 calls what torch has since renamed; nothing that a user could mend
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    given = sys.argv[1:] if arguments is None else list(arguments)
    name, rest = split_command(given)
    if name is not None:
        parser = _command_parser(name)
        try:
            sys.exit(COMMANDS[name](**parser.instantiate(parser.parse_args(rest)).as_dict()))
        except (ValueError, OSError) as error:
            parser.error(str(error))
    second_words = [command.partition(" ")[2] for command in COMMANDS if command.split()[:-1] == given[:1]]
    if given and second_words:
        _Parser(prog=PROGRAM).error(f"{given[0]} must be followed by one of {', '.join(second_words)}.")
    BoostCLI(
        LowRankLanguageModel,
        TextDataModule,
        args=None if arguments is None else given,
        parser_class=_Parser,
        parser_kwargs={"prog": PROGRAM, "description": DESCRIPTION},
        auto_configure_optimizers=False,
    )


def split_command(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the command that arguments begin with, if it is none of Lightning's, and the rest of them."""
    for num_words in (2, 1):
        name = " ".join(arguments[:num_words])
        if name in COMMANDS:
            return name, list(arguments[num_words:])
    return None, list(arguments)


def _command_parser(name: str) -> _Parser:
    """Return a parser of a command's parameters.

    Those that are off by default become flags, with hyphens as well as underscores. A name that Python reserves has an
    underscore behind it that the option has not.
    """
    command = COMMANDS[name]
    parameters = inspect.signature(command).parameters
    flags = [option for option, parameter in parameters.items() if parameter.default is False]
    description, *_ = (inspect.getdoc(command) or "").partition("\n\nArgs:")
    parser = _Parser(prog=f"{PROGRAM} {name}", description=description)
    reserved = [option for option in parameters if option.endswith("_")]
    parser.add_function_arguments(command, as_positional=True, skip={*flags, *reserved})
    for option in reserved:
        parser.add_argument(
            f"--{option[:-1]}", dest=option, metavar="NAME", type=str, default=None, help=_describe(command, option)
        )
    for flag in flags:
        spellings = dict.fromkeys((f"--{flag}", f"--{flag.replace('_', '-')}"))
        parser.add_argument(*spellings, action="store_true", help=_describe(command, flag))
    return parser


def _describe(command: Callable[..., int], option: str) -> str:
    """Return what the command's docstring says of an option."""
    described = re.search(rf"^ *{option}: (.*)$", inspect.getdoc(command) or "", re.MULTILINE)
    return described[1] if described else ""
