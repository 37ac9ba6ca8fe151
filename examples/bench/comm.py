"""What compressed communication is worth: a training step by method and speed of the link, and bytes on the wire.

    python examples/bench/comm.py                               # 2 hosts of 1 rank, links of 1000 and 100 Mbit/s
    python examples/bench/comm.py --ranks-per-host 2            # hierarchical methods: 2 hosts of 2 ranks
    python examples/bench/comm.py --methods ddp stage0 OneBitAdam --links 100 --layers 2 --width 512
    python examples/bench/comm.py --loopback                    # no root, no slow link: this machine's loopback
    torchrun --nnodes 2 --nproc-per-node 1 ... examples/bench/comm.py    # real hosts and their real link

The two hosts are network namespaces of this machine (see hosts.py). Their ranks live for the whole run and train the
demo's GPT by one method after another, all methods in turn, several times. Figures are medians over rounds and ratios
to another method in the same round, because absolute times on a shared machine mean little. A step is the mean over
the steps after a warm-up, in which compressing optimizers have begun to compress.

    ms          of a step, and the ratio to DDP's and to that of the same method without compression
    processor   what a rank of it computes for itself, all its threads
    wire        bytes that a host sends over the link in a step, from the counters of its interface
    link busy   the share of the step that the link needs for these bytes at its rate: where it is near 100 %, fewer
                bytes are all that helps; where it is low, the processors or the round trips are what a step waits for
    calls       collectives of a rank in a step, by the engine's ledger; each is at least a trip over the link
    counted     bytes that the engine's ledger counts on both hosts to those of all interfaces: headers of packets,
                acknowledgements and small agreements between ranks are what it leaves out
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from comm_launch import Failed, Joined, Ranks, Started
from comm_methods import HIERARCHICAL, methods
from comm_table import Results, Run, plot, report
from hosts import Hosts, Loopback, missing

ELSEWHERE = """Two ways without: --loopback measures on this machine's loopback as it is; or on each of two real hosts
    GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 (or 1) --master-addr FIRST_HOST \\
        --master-port 29500 examples/bench/comm.py"""


def measure(
    ranks: Ranks, results: Results, link: str, names: list[str], turns: int, per_host: int, shared: bool
) -> None:
    """Let all methods take turns on one link."""
    for turn in range(turns):
        for name in names:
            if name in results.skipped:
                continue
            tell(f"\r{link}, round {turn + 1} of {turns}: {name:24}")
            try:
                answers = ranks.ask("measure", name)
            except Failed as error:
                results.skipped[name] = f"failed on {link}: {str(error).splitlines()[0]}"
                results.failed.add(name)
                print(f"\n{error}", file=sys.stderr)
                continue
            refusals = [answer["refused"] for answer in answers if "refused" in answer]
            if refusals:
                results.skipped[name] = " ".join(refusals[0].split())
                continue
            results.runs.setdefault((link, name), {})[turn] = Run.of(answers, per_host, shared)
    tell("\r" + " " * 72 + "\r")


def tell(text: str) -> None:
    """Progress, for who looks on."""
    if sys.stderr.isatty():
        print(text, end="", file=sys.stderr, flush=True)


@contextmanager
def ranks_of(args: argparse.Namespace) -> Iterator[tuple[Ranks, Hosts | None]]:
    """The ranks, and the hosts where they are of this machine."""
    keys = ("layers", "width", "length", "batch", "steps", "precision", "profile")
    settings = {key: getattr(args, key) for key in keys}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
        if interface is None:
            raise SystemExit("Set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the link's interface, on every host.")
        if os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]:
            raise SystemExit("A link needs two hosts: torchrun --nnodes 2, on each of them.")
        yield Joined({**settings, "accelerator": args.accelerator, "interface": interface}), None
        return
    hosts = Loopback() if args.loopback else Hosts()
    with tempfile.TemporaryDirectory() as folder, hosts:
        settings |= {"accelerator": "cpu", "interface": hosts.interface}
        yield Started(hosts, args.ranks_per_host, settings, args.timeout, Path(folder)), hosts


def run(args: argparse.Namespace) -> int:
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks_per_host))
    quiet = int(os.environ.get("RANK", "0")) != 0
    names = args.methods or list(methods(per_host) if per_host == 1 else HIERARCHICAL)
    unknown = [name for name in names if name not in methods(per_host)]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: not among {', '.join(methods(per_host))}")
    results, labels = Results(), []
    with ranks_of(args) as (ranks, hosts):
        slow = hosts is not None and not args.loopback
        for mbit in args.links if slow else [None]:
            link = f"{mbit} Mbit/s" if mbit else "loopback" if hosts is not None else "the hosts' link"
            if hosts is not None:
                hosts.limit(mbit)
            probe = ranks.ask("probe", int((mbit or 1000) * 1e6 / 8))[0]  # a second's worth
            results.rates[link] = probe["rate"] if probe else 0.0
            measure(ranks, results, link, names, args.rounds, per_host, isinstance(hosts, Loopback))
            labels.append(link)
            if not quiet:
                report(results, link, probe["trip"], names, per_host)
    if quiet:
        return 0
    for name, reason in results.skipped.items():
        print(f"{name} skipped: {reason}")
    measured = [name for name in names if any(method == name for _, method in results.runs)]
    if measured and args.out and importlib.util.find_spec("matplotlib") is not None:
        plot(results, labels, measured, args.out)
    return 1 if results.failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", help="default: all that suit the number of ranks of a host")
    parser.add_argument("--links", nargs="+", type=int, default=[1000, 100], help="rates in Mbit/s")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured, after the warm-up")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=64, help="bytes of a text")
    parser.add_argument("--batch", type=int, default=1, help="texts of a rank and step")
    parser.add_argument("--precision", default="32-true", help="as Trainer(precision=...)")
    parser.add_argument("--accelerator", default="cpu", help="under torchrun, as Trainer(accelerator=...)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one method may take")
    parser.add_argument("--loopback", action="store_true", help="no namespaces and no slow link")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="name the N slowest functions of a method")
    parser.add_argument("--out", default="comm.png", help="file of the plot")
    args = parser.parse_args()
    lacks = [] if args.loopback or "TORCHELASTIC_RUN_ID" in os.environ else missing()
    if lacks:
        raise SystemExit("No slow link without " + "; and without ".join(lacks) + ".\n" + ELSEWHERE)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # hosts are removed on the way out
    raise SystemExit(run(args))


if __name__ == "__main__":
    main()
