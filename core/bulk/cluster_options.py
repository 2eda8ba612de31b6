"""Options of commands whose rows a cluster may answer.

Owns `--ray-address` and `--replicas`. Loads nothing that answers rows.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from triptych.core.errors import ConfigError
from triptych.core.options.table import resolve
from triptych.core.weights.resolve import EMBEDDED_REFERENCE, served_name

if TYPE_CHECKING:
    from triptych.core.bulk.work import Cluster


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the cluster options, for commands that call `read_cluster`."""
    group = parser.add_argument_group("on a cluster")
    group.add_argument(
        "--ray-address",
        dest="cluster_address",
        metavar="ADDRESS",
        help="distribute the rows over a Ray cluster (`auto`: the local one) with Ray Data",
    )
    group.add_argument(
        "--replicas",
        dest="cluster_engines",
        metavar="N",
        help="engines on the cluster: a number, or `min..max` for as many as fit [default 1]",
    )


def read_cluster(args: argparse.Namespace) -> Cluster | None:
    """The cluster set by the arguments; `None`: this process. Raises `ConfigError`."""
    if args.cluster_address is None:
        if args.cluster_engines is not None:
            raise ConfigError("--replicas needs --ray-address: this process runs one engine.")
        return None
    from triptych.core.bulk.cluster import read_count
    from triptych.core.bulk.work import Cluster

    if getattr(args, "server", None) not in (None, "none"):
        raise ConfigError("--ray-address and --server exclude each other: leave one out.")
    least, most = read_count(args.cluster_engines or "1")
    return Cluster(
        address=args.cluster_address or "auto", least=least, most=most, config=resolve(args)
    )


def model_of(args: argparse.Namespace, default: str) -> str:
    """The model of a command's rows, as it was given; the name of the `default` without one."""
    references = resolve(args).models.model
    is_default = references in ((), (EMBEDDED_REFERENCE,))
    return served_name(default) if is_default else ", ".join(references)
