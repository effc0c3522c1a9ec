"""Which program makes each record of the result files, and with which arguments: `PROGRAMS`.

The records that one call of a program writes at once are a `Job`: the configurations of a model take turns, so
they are measured together. What a job measures follows from its records. A new job has none yet: a table of its
program, or the file of another machine, tells what it measures.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plots import case_name
from sources import REPOSITORY, Subject

sys.path.insert(0, str(REPOSITORY / "examples"))  # whose tables of shapes the programs share

Record = dict[str, Any]
# Trials of drafts and of variants that were given up, and a measurement of an older commit to compare with.
BY_HAND = re.compile(r".*-(\w+-)?tuning|.*-(layernorm-quant|quant-rows|row-index|host-start)|planted-trial")
# The models of README.md's table. They are also timed beside torch.compile with max-autotune.
HEADLINE = ("ltx13b", "ltx2", "flux", "flux2", "sd35", "qwen", "wan", "zimage", "chroma", "cogvideox")
AUTOTUNED = "autotune_compile"  # of benchmarks/models.py: torch.compile at its best
LEDGER = "{machine}-queue"  # what benchmarks/measure.py writes of its jobs
WHOLE = ""  # the name of the job of a program that measures its file at once


def configs(records: Sequence[Record], option: str = "--configs", key: str = "config") -> list[str]:
    """An option with the values that the records have, in their order."""
    values = dict.fromkeys(str(record[key]) for record in records if key in record)
    return [option, *values] if values else []


@dataclass(frozen=True)
class Program:
    """A program and one of its result files.

    script: The program, in the repository.
    file: The name of the result file without its ending; {machine} stands for what was measured on.
    name_of: The job of a record; None: the file is measured at once.
    options: What the program is called with for a job, from its name and its records.
    flag: The option that takes the names of jobs, several at a time; none: a call for each job, which is in `options`.
    value_of: The value of `flag` for a job.
    tables: The module and the name in it that list the jobs which every machine should have.
    also: Another result file that the same call writes.
    keys: How the program's tables name what a job measures (sources.Subject).
    functions: The public functions that it measures, where the program does not name them.
    machine: What it is measured on where the name of its file does not say so.
    in_place: Whether the program keeps what its file has of other jobs, or goes on where it was stopped. The output of
        others goes to a file of its own until they have ended.
    folder: Whether the program's --output is a folder.
    in_parts: Whether the program writes a job's records one after the other, or twice. They are whole when the next
        job begins, or when the program has ended.
    shares: Whether the program calls `sharing.share`, so that other programs can use the GPU while it compiles.
    times_host: Whether the program times the host, and no other one may run beside it.
    copies: A guess, from reading the program: how many times the peaks of its records it holds, since it keeps several
        models. Where it is too low, a job can run out of memory beside others. It then runs again alone.
    root: The definition of the program that says what is measured (sources.Subject).
    """

    script: str
    file: str
    name_of: Callable[[Record], str] | None = None
    options: Callable[[str, Sequence[Record]], Sequence[str]] = lambda name, records: ()
    flag: str = ""
    value_of: Callable[[str], str] = str
    tables: tuple[str, str] | None = None
    also: str = ""
    keys: Callable[[str], Iterable[str]] = lambda name: ()
    functions: Callable[[str, Sequence[Record]], Iterable[str]] = lambda name, records: ()
    machine: str = ""
    in_place: bool = True
    folder: bool = False
    in_parts: bool = False
    shares: bool = False
    times_host: bool = False
    copies: float = 1.0
    root: str = "main"

    @property
    def about(self) -> str:
        """What the file is about, in the names of its jobs: ops, models, models-int8."""
        return self.file.replace("{machine}", "").strip("-")

    def job_of(self, record: Record) -> str:
        return WHOLE if self.name_of is None else self.name_of(record)

    def machine_of(self, file: str) -> str | None:
        """The machine of a result file of this program; None for another program's file."""
        pattern = re.escape(self.file).replace(re.escape("{machine}"), r"(?P<machine>[a-z]+\d*[\w-]*?|cpu)")
        match = re.fullmatch(pattern, file)
        return None if match is None else self.machine or match.groupdict().get("machine")

    def listed(self) -> list[str]:
        """The jobs that every machine should have."""
        if self.tables is None:
            return []
        module, name = self.tables
        table = getattr(importlib.import_module(module), name)
        return [str(getattr(one, "name", one)) for one in (table() if callable(table) else table)]


def function_of(op: str) -> str:
    """The public function that an op of benchmarks/op_cases.py times: "quantised rmsnorm by index" is rmsnorm_quant."""
    name = re.split("[ ,]", op.removeprefix("quantised "))[0]
    return f"{name}_quant" if op.startswith("quantised ") else name


def _ops(file: str, tables: tuple[str, str] | None = None) -> Program:
    return Program(
        "benchmarks/ops.py",
        file,
        case_name,
        lambda name, records: ["--update"],
        "--cases",
        tables=tables,
        keys=lambda name: {function_of(name), function_of(name).removesuffix("_quant")},
        functions=lambda name, records: {function_of(name)},
    )


def _llm_options(name: str, records: Sequence[Record]) -> list[str]:
    model, _, rest = name.split(" ", 2)
    layers, _, padding = rest.removeprefix("of ").partition(" layers, padded by ")
    options = ["--models", model, "--layers", layers.removesuffix(" layers"), *configs(records)]
    options += ["--padding", padding] if padding else []
    return options + (["--profile"] if any("ms_by_kind" in record for record in records) else [])


def _llm_name(record: Record) -> str:
    padding = f", padded by {record['padding']}" if record.get("padding") else ""
    return f"{record['model']} {record['tokens']}x{record['batch']} of {record['layers']} layers{padding}"


def _model_options(name: str, records: Sequence[Record]) -> list[str]:
    blocks = max((max(record["blocks"].values()) for record in records if record.get("shallow")), default=0)
    options = configs(records)
    if name in HEADLINE and "compile" in options and AUTOTUNED not in options:
        options.append(AUTOTUNED)
    return [*options, *(["--blocks", str(blocks)] if blocks else [])]


def _memory_options(name: str, records: Sequence[Record]) -> list[str]:
    blocks = max((record["blocks"] for record in records if "blocks" in record), default=0)
    options = [*configs(records), *configs(records, "--offload", "offload")]
    return [*options, "--blocks", str(blocks)] if blocks else options


def _clip_options(name: str, records: Sequence[Record]) -> list[str]:
    model, recipe, size = name.split()
    options = ["--update", "--models", model, "--recipes", recipe, "--sizes", size, *configs(records)]
    return [*options, "--idle"] if any("idle_ms" in record for record in records) else options


def _image_options(name: str, records: Sequence[Record]) -> list[str]:
    options = ["--update", "--models", name, *configs(records)]
    return [*options, "--idle"] if any("idle_ms" in record for record in records) else options


def _size(record: Record) -> str:
    return f"{record['frames']}x{record['height']}x{record['width']}"


def _vae_options(name: str, records: Sequence[Record]) -> list[str]:
    if name == "ops":
        return ["--update", "--models"]
    model, half, size, dtype = name.split()
    options = ["--update", "--no-ops", "--models", model, "--halves", half, "--sizes", size, "--dtype", dtype]
    compiled = any(record["config"] == "compile" for record in records)
    return [*options, *configs(records), "--compiled", *([model] if compiled else [])]


def _parallel_options(name: str, records: Sequence[Record]) -> list[str]:
    return ["--update", "--models", name, *configs(records), *configs(records, "--modes", "mode")]


def _train_llm_name(record: Record) -> str:
    return f"{record['model']} {record['tokens']}{'' if record['checkpointing'] else ' without checkpoints'}"


def _train_llm_options(name: str, records: Sequence[Record]) -> list[str]:
    _, size, *rest = name.split(" ", 2)
    form = "off" if rest else "on"
    return ["--update", "--profile", "--sizes", size, "--checkpointing", form, *configs(records)]


def _train_options(name: str, records: Sequence[Record]) -> list[str]:
    options = ["--update", *configs(records), *(["--rank", "0"] if name.endswith(" whole") else [])]
    return options + (["--profile"] if any("ms_by_kind" in record for record in records) else [])


def _mutations(backend: str, machine: str) -> Program:
    return Program(
        "tests/mutations.py",
        f"mutations-{backend}",
        lambda record: str(record["defect"]),
        lambda name, records: ["--backend", backend, f"--only={name}"],
        machine=machine,
        keys=lambda name: (name,),
        root="MUTATIONS",  # a defect with its file and its tests; how they are run does not count
    )


def _by_name(key: str) -> Callable[[Record], str]:
    return lambda record: str(record.get(key, "ops"))


def _ltx(file: str, *arguments: str) -> Program:
    return Program(
        "benchmarks/ltx.py",
        file,
        lambda record: f"{record['frames']} frames",
        lambda name, records: [*arguments, *configs(records)],
        "--frames",
        lambda name: name.split()[0],
        shares=True,
    )


def _one(name: str) -> tuple[str, ...]:
    """The first word of a job's name, which is the model."""
    return (name.split()[0],)


PROGRAMS = [
    _ops("{machine}-ops", ("op_cases", "cases")),
    _ops("{machine}-gates"),
    Program(
        "benchmarks/backward.py", "{machine}-backward", in_place=False,
        functions=lambda name, records: {function_of(record["op"]) for record in records},
    ),
    Program(
        "benchmarks/models.py", "{machine}-models", _by_name("model"),
        lambda name, records: [*_model_options(name, records), "--profile"], "--models",
        tables=("model_shapes", "MODELS"), also="{machine}-models-profile", keys=_one, shares=True,
    ),
    Program(
        "benchmarks/models.py", "{machine}-models-int8", _by_name("model"), _model_options, "--models", keys=_one,
        shares=True,
    ),
    Program(
        "benchmarks/models.py", "{machine}-models-low", _by_name("model"), _model_options, "--models", keys=_one,
        shares=True,
    ),
    Program(
        "benchmarks/attention.py", "{machine}-attention", _by_name("name"), flag="--only", tables=("attention", "ALL"),
        keys=_one,
    ),
    Program(
        "benchmarks/llm.py", "{machine}-llm", _llm_name, _llm_options, "--sizes", lambda name: name.split()[1],
        keys=_one, shares=True, copies=1.8,
    ),
    Program(
        "benchmarks/clip.py", "{machine}-clip", lambda record: f"{record['model']} {record['recipe']} {_size(record)}",
        _clip_options, keys=_one, shares=True,
    ),
    Program(
        "benchmarks/image.py", "{machine}-image", _by_name("model"), _image_options, keys=_one, shares=True, copies=1.4,
    ),
    Program(
        "benchmarks/vae.py", "{machine}-vae",
        lambda record: "ops" if "op" in record else " ".join(
            (record["model"], record["half"], _size(record), record["dtype"])
        ),
        _vae_options, keys=_one, shares=True,
    ),
    Program("benchmarks/memory.py", "{machine}-memory", _by_name("model"), _memory_options, "--models", keys=_one),
    Program(
        "benchmarks/host.py", "{machine}-host", _by_name("model"),
        lambda name, records: ["--models"] if name == "ops" else [*configs(records), "--no-ops", "--models", name],
        keys=_one, times_host=True,
    ),
    Program(
        # Each call times the bare exchanges too, and FLUX.1's call is the shortest.
        "benchmarks/parallel.py", "{machine}-parallel", lambda record: str(record.get("model", "flux")),
        _parallel_options, keys=_one, in_parts=True,
    ),
    _ltx("{machine}-ltx"),
    _ltx("{machine}-ltx-batch1", "--batch", "1"),
    Program(
        "benchmarks/fp8_families.py", "{machine}-fp8-families", _by_name("model"), flag="--models", keys=_one,
        shares=True,
    ),
    Program(
        "benchmarks/fp8_families.py", "fp8-low", _by_name("model"),
        lambda name, records: ["--few-tokens", "--blocks", "1"], "--models", machine="cpu", keys=_one,
    ),
    Program(
        "benchmarks/counters.py", "{machine}-counters", in_place=False,
        functions=lambda name, records: {function_of(record["case"]) for record in records},
    ),
    Program("benchmarks/fp8.py", "{machine}-fp8", in_place=False),
    Program("benchmarks/fp8_gemm.py", "{machine}-fp8-gemm", in_place=False),
    Program("benchmarks/lora.py", "{machine}-lora", in_place=False),
    Program(
        "benchmarks/train.py", "{machine}-train",
        lambda record: f"{record['model']}{'' if record['rank'] else ' whole'}",
        _train_options,
        "--models", lambda name: name.split()[0], keys=_one, shares=True, in_parts=True, copies=2.3,
    ),
    Program(
        "benchmarks/train_llm.py", "{machine}-train-llm", _train_llm_name, _train_llm_options, "--models",
        lambda name: name.split()[0], tables=("llm_shapes", "TRAINED"), keys=_one, shares=True,
        in_parts=True,
    ),
    Program("benchmarks/quality.py", "{machine}-quality", in_place=False),
    Program("benchmarks/engines.py", "{machine}-engines", in_place=False),
    Program("benchmarks/cards.py", "cards", machine="cpu", in_place=False),
    Program("benchmarks/fp8_layers.py", "fp8-layers", machine="cpu", in_place=False),
    Program("benchmarks/fp8_numerics.py", "fp8-numerics", machine="cpu", in_place=False),
    Program("benchmarks/serving.py", "cpu-serving", machine="cpu", in_place=False),
    Program(
        "benchmarks/engine_versions.py", "engine-versions", _by_name("engine"), lambda name, records: [name],
        machine="cpu",
    ),
    Program("tests/fuzz.py", "fuzz-{machine}", options=lambda name, records: ["--no-shrink", "--resume"]),
    Program("tests/sanitize.py", "sanitize-{machine}", options=lambda name, records: ["--resume"]),
    Program(
        "tests/gpu.py", "suites-{machine}", folder=True,
        options=lambda name, records: ["--resume", "--parts", "tests", "models", "devices", "forced", "large"],
    ),
    _mutations("cpu", "cpu"),
    _mutations("tools", "cpu"),
    _mutations("cuda", "cuda"),
]  # fmt: skip


def program_of(file: str) -> Program | None:
    """The program that writes a result file; None for trials by hand, for files of the queue, and for unknown ones."""
    if is_by_hand(file) or is_ledger(file):
        return None
    found = [
        program
        for program in PROGRAMS
        if program.machine_of(file) or (program.also and _also(program).machine_of(file))
    ]
    # "h200-ltx-batch1" is not of a machine "h200-ltx": the name that says most counts.
    return max(found, key=lambda program: len(program.about), default=None)


def _also(program: Program) -> Program:
    return Program(program.script, program.also)


def is_by_hand(file: str) -> bool:
    return BY_HAND.fullmatch(file) is not None


def is_ledger(file: str) -> bool:
    return re.fullmatch(LEDGER.replace("{machine}", ".+"), file) is not None


@dataclass(frozen=True, eq=False)
class Job:
    """What one call of a program measures and writes at once."""

    program: Program
    machine: str
    name: str
    records: list[Record] = field(default_factory=list)  # each with its commit and date; none: not measured yet
    like: list[Record] = field(default_factory=list)  # another machine's, which say what to measure

    @property
    def title(self) -> str:
        return self.program.about if self.name == WHOLE else f"{self.program.about}: {self.name}"

    @property
    def file(self) -> str:
        return self.program.file.replace("{machine}", self.machine)

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(self.program.options(self.name, self.records or self.like))

    @property
    def lacking(self) -> list[str]:
        """The configurations that a call measures and the records lack, such as a peer that was added later."""
        known = {record.get("config") for record in self.records}
        return [config for config in self.configs if config not in known] if self.records else []

    @property
    def configs(self) -> list[str]:
        """The configurations that its call names."""
        configs = itertools.dropwhile(lambda option: option != "--configs", self.options)
        return list(itertools.takewhile(lambda option: not option.startswith("--"), list(configs)[1:]))

    @property
    def subject(self) -> Subject:
        records = self.records or self.like
        files = [record["file"] for record in records if "defect" in record]
        files += [f"tests/{record['caught_by'].split('::')[0]}" for record in records if record.get("caught_by")]
        return Subject(
            self.program.script,
            frozenset(self.program.keys(self.name)),
            frozenset(self.program.functions(self.name, records)),
            "cpu" if self.machine == "cpu" else "cuda",
            everything=self.program.script.startswith("tests/") and not files,
            files=tuple(sorted(set(files))),
            root=self.program.root,
        )

    @property
    def commits(self) -> set[str | None]:
        return {record.get("commit") for record in self.records}


def records_in(path: Path) -> list[Record]:
    """The records of a result file, each with the commit and date of its run; a file without a list of them is one."""
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    of_the_run = {key: result["meta"].get(key) for key in ("commit", "date")}
    records = result.get("records")
    if not isinstance(records, list) or not records:
        return [of_the_run]
    # A record that an earlier run left has its commit, and its date is not known unless it has that too.
    return [{**of_the_run, **({"date": None} if "commit" in record else {}), **record} for record in records]


def is_one_gpu(machine: str) -> bool:
    """Whether the tables of what every machine should have are meant for this one."""
    return machine not in ("cpu", "cuda") and not re.search(r"x\d+$", machine)


def jobs_of(program: Program, machine: str, folder: Path, like: str = "") -> list[Job]:
    """The jobs of a program for a machine: those in its files, those of another machine, and those that are listed."""

    def by_name(of: str) -> dict[str, list[Record]]:
        found: dict[str, list[Record]] = {}
        for file in filter(None, (program.file, program.also)):
            for record in records_in(folder / f"{file.replace('{machine}', of)}.json"):
                found.setdefault(program.job_of(record), []).append(record)
        return found

    if program.machine not in ("", machine):
        return []
    mine, others = by_name(machine), by_name(like) if like else {}
    listed = program.listed() if is_one_gpu(machine) else []
    names = dict.fromkeys((*mine, *others, *listed))
    return [Job(program, machine, name, mine.get(name, []), others.get(name, [])) for name in names]
