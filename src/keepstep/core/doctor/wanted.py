"""Wanted: whether options and variables fit together, and what jobs before have left.

Comes in: what is asked of the machine. Goes out: defects. Of the secret only its strength is known
here.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.core.doctor.defect import Defect, DoctorCheck, broken, warning
from keepstep.model.machine_facts import MachineFacts
from keepstep.model.topology import Parity, ReedSolomon, parse_policy
from keepstep.model.units import human_bytes

MIN_SECRET_CHARACTERS = 8  # different ones: fewer are a pattern
# What makes trainings wrong or slow where it is left over from a debugging session.
DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": "each kernel waits for the one before: nothing overlaps",
    "TORCH_NCCL_BLOCKING_WAIT": "each collective waits on the CPU: nothing overlaps",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor is allocated anew, and waits for the GPU",
}


def options(facts: MachineFacts) -> Iterator[Defect]:
    """Whether keepstep's own variables can be read."""
    for problem in facts.wanted.problems:
        yield broken(
            problem,
            "every job with these variables is refused at its start",
            "set it as docs/configuration.md says, or unset it",
        )


def internal_variables(facts: MachineFacts) -> Iterator[Defect]:
    """Whether variables are left over that keepstep hands down to its own processes."""
    for variable in facts.wanted.internal:
        yield warning(
            f"{variable} is set",
            "only keepstep sets it, in the processes it starts: a job would look for an agent that "
            "is not its own",
            f"unset {variable}",
        )


def option_packages(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the packages are there that options need."""
    wanted, packages = facts.wanted, facts.software.packages
    needs = [
        ("KEEPSTEP_METRICS_PORT", wanted.metrics_port is not None, "prometheus_client", "metrics"),
        ("KEEPSTEP_BLOCK_MAC", wanted.block_mac == "on", "cryptography", "secure"),
        ("KEEPSTEP_ENCRYPT", wanted.encrypt, "cryptography", "secure"),
        ("KEEPSTEP_REDUNDANCY", _is_coded(wanted.redundancy), "numpy", "rs"),
    ]
    for variable, is_wanted, package, extra in needs:
        if is_wanted and package not in packages:
            yield broken(
                f"{variable} needs {package}, which is not installed",
                "a job with this option is refused at its start",
                f"pip install 'keepstep[{extra}]'",
            )
    if wanted.store_package is not None and wanted.store_package not in packages:
        yield broken(
            f"a store at {_shown(wanted.store)} needs {wanted.store_package}, which is not there",
            "a job with this store is refused at its start",
            f"pip install {wanted.store_package}",
        )


def secret(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the secret is one, and where it has to be there, it is."""
    wanted = facts.wanted
    make = 'export KEEPSTEP_SECRET="$(openssl rand -hex 32)", the same on every node'
    characters = wanted.secret_characters
    if characters is None:
        if wanted.encrypt:
            yield broken(
                "KEEPSTEP_ENCRYPT is set, and no secret",
                "one that is made at the start crosses the network readable: the job is refused",
                make,
            )
        elif wanted.nodes > 1:
            yield warning(
                "several nodes, and no secret",
                "one is made at the start, and crosses the network readable",
                make,
            )
    elif characters < MIN_SECRET_CHARACTERS:
        yield warning(
            f"the secret has only {characters} different characters",
            "who guesses it reads and writes the job's memory",
            make,
        )


def rank_variables(facts: MachineFacts) -> Iterator[Defect]:
    """Whether a launcher's variables, where they are set, belong together."""
    environ = facts.wanted.environ
    names = ("RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in environ]
    why = "protect takes this process for a rank of a job, and waits for the others"
    if len(missing) == 1:
        there = next(name for name in names if name in environ)
        yield broken(f"{there} is set, and {missing[0]} is not", why, f"unset {there}")
    elif not missing:
        rank, size = (environ[name] for name in names)
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            yield broken(
                f"RANK={rank} and WORLD_SIZE={size} do not belong together",
                why,
                "unset RANK WORLD_SIZE LOCAL_RANK, or start it by keepstep run",
            )


def debugging_variables(facts: MachineFacts) -> Iterator[Defect]:
    """Whether variables are set that slow training down."""
    for variable, why in DEBUGGING.items():
        if facts.wanted.environ.get(variable, "0") not in ("", "0"):
            yield warning(f"{variable} is set", why, f"unset {variable}")


def left_memory(facts: MachineFacts) -> Iterator[Defect]:
    """Whether dead jobs have left memory."""
    for left in facts.wanted.left:
        yield warning(
            f"the dead job {left.job} holds {human_bytes(left.bytes)} of {facts.arena.path}",
            "nobody else can use it; a job of that name would go on from it",
            f"keepstep clean --job {left.job}",
        )


def _is_coded(redundancy: str) -> bool:
    return isinstance(parse_policy(redundancy), (Parity, ReedSolomon))


def _shown(url: str | None) -> str:
    """Of a URL what is no password: its scheme."""
    return f"{(url or '').partition('://')[0]}://..."


CHECKS = (
    DoctorCheck("options", options),
    DoctorCheck("internal-variables", internal_variables),
    DoctorCheck("option-packages", option_packages),
    DoctorCheck("secret", secret),
    DoctorCheck("rank-variables", rank_variables),
    DoctorCheck("debugging-variables", debugging_variables),
    DoctorCheck("left-memory", left_memory),
)
