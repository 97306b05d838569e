"""``chaoskit checkpoint``: what is stored below a directory or URL, whether it is whole, and whether it restores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chaoskit.cli.output import Json, command_app, console, print_json
from chaoskit.errors import BadInput
from chaoskit.plaintext import echo
from chaoskit.vocabulary import Verdict

if TYPE_CHECKING:
    from chaoskit.checkpoint.disk.retention import Retention
    from chaoskit.checkpoint.disk.snapshot import Snapshot
    from chaoskit.checkpoint.inspecting import Contents, Inspected

app = command_app(
    "Look at stored snapshots, in a directory or behind a URL, verify them, and prove that they restore."
)

#: A store's field -> the argument that sets it.
FIELDS = {"url": "DIRECTORY", "root": "DIRECTORY"}

Root = Annotated[
    str,
    typer.Argument(
        metavar="DIRECTORY|URL",
        help="Directory of snapshots, as DiskTier and SnapshotWriter have it, or URL as RemoteTier has it: "
        "s3://bucket/run, gs://bucket/run, file:///mnt/run. Credentials come from the usual places: of S3 "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, or the role of the instance.",
    ),
]
Endpoint = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="Of s3://: where a store listens that is not Amazon's: http://minio:9000.",
    ),
]
Deadline = Annotated[float, typer.Option(help="Remote stores: seconds to retry before failing.")]
Step = Annotated[int | None, typer.Option(help="Only the newest snapshot of this step.")]


@app.command("list")
def list_(
    root: Root, endpoint: Endpoint = "", deadline_s: Deadline = 30.0, machine: Json = False
) -> None:
    """List the snapshots, the newest first, and what is damaged, in quarantine or being written.

    Manifests are read, data files are not: see [bold]verify[/].

    Examples: [cyan]chaoskit checkpoint list checkpoints[/],
    [cyan]chaoskit checkpoint list s3://bucket/run --endpoint http://minio:9000[/]
    """
    with _opened(root, endpoint, deadline_s) as tier:
        found = tier.contents()
    rows = [_plain(snapshot) for snapshot in found.snapshots]
    damaged = [{"name": one.name, "reason": one.reason} for one in found.damaged]
    if machine:
        print_json(
            {
                "snapshots": rows,
                "damaged": damaged,
                "quarantine": found.quarantine,
                "staging": found.unfinished,
            }
        )
        return
    _print_snapshots(rows)
    for one in damaged:
        echo(f"{one['name']}  damaged: {one['reason']}")
    for name in found.quarantine:
        echo(f"{name}  in quarantine")
    for name in found.unfinished:
        echo(f"{name}  not complete")
    if not (rows or damaged):
        echo("no snapshots")


def _print_snapshots(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of whole snapshots."""
    from chaoskit.report.tables import Column, DataTable

    if not rows:
        return
    numbers = [Column(name, is_number=True) for name in ("size", "ranks", "tensors")]
    table = DataTable(Column("snapshot", is_heading=True), *numbers, Column("saved"))
    for row in rows:
        table.add_row(
            row["name"],
            _size(row["size_bytes"]),
            str(row["world"]),
            str(row["tensors"]),
            str(row["saved_at"]),
        )
    console().print(table)


@app.command()
def verify(
    root: Root,
    step: Step = None,
    quarantine: Annotated[
        bool,
        typer.Option(
            "--quarantine", help="Set aside what is damaged, so that no restore tries it."
        ),
    ] = False,
    endpoint: Endpoint = "",
    deadline_s: Deadline = 30.0,
    machine: Json = False,
) -> int:
    """Read every byte of the snapshots, and compare the digests.

    Of a URL that is as much traffic as restoring all of them: name a --step where
    traffic costs money.

    Exit code 0: all are whole, 1: some are damaged, 2: bad input, or a store that
    refuses or does not answer, 10: there is nothing to verify.

    Example: [cyan]chaoskit checkpoint verify checkpoints --quarantine[/]
    """
    found: list[dict[str, Any]] = []
    with _opened(root, endpoint, deadline_s) as tier:
        for name, damage in _checked(tier, step):
            place = tier.set_aside(name, damage) if damage and quarantine else tier.place(name)
            found.append({"name": name, "path": place, "damage": damage})
            if not machine:
                echo(f"{name}  {'damaged: ' + damage if damage else 'whole'}")
    failed = any(one["damage"] for one in found)
    verdict = Verdict.FAILED if failed else Verdict.PASSED if found else Verdict.UNKNOWN
    if machine:
        print_json({"verdict": verdict, "snapshots": found})
    elif not found:
        echo("nothing to verify")
    return verdict.exit_code


@app.command("restore-drill")
def restore_drill(
    root: Root,
    step: Step = None,
    endpoint: Endpoint = "",
    deadline_s: Deadline = 30.0,
    machine: Json = False,
) -> int:
    """Prove that a snapshot restores: load it in a fresh process, and compare.

    Every tensor is loaded twice, with chaoskit's reader and with plain
    torch.distributed.checkpoint, and the bits of both are compared. Like every
    load with torch, this unpickles the file .metadata: use it on your own snapshots.

    From a URL the snapshot is downloaded first, verified, into a directory below
    $TMPDIR that is removed afterwards.

    Exit code 0: it restores, 1: it does not, 2: bad input, or a store that refuses
    or does not answer, 10: there is nothing to restore.

    Examples: [cyan]chaoskit checkpoint restore-drill checkpoints --step 1200[/],
    [cyan]chaoskit checkpoint restore-drill s3://bucket/run[/]
    """
    with _opened(root, endpoint, deadline_s) as tier:
        chosen = _chosen(tier.contents(), step)[:1]
        drills = [tier.drill(snapshot) for snapshot in chosen]
    if not drills:
        if machine:
            print_json({"verdict": Verdict.UNKNOWN})
        else:
            echo("nothing to restore")
        return Verdict.UNKNOWN.exit_code
    found = drills[0]
    verdict = Verdict.PASSED if found.passed else Verdict.FAILED
    if machine:
        import msgspec

        print_json({"verdict": verdict, "name": chosen[0].name, **msgspec.to_builtins(found)})
    elif found.passed:
        parts = f"{found.tensors} tensors and {found.objects} objects, {_size(found.size_bytes)}"
        before = f"downloaded in {found.download_s:.2f} s; " if found.download_s else ""
        echo(
            f"{chosen[0].name} restores: {parts}; {before}{found.ours_s:.2f} s, with plain torch {found.torch_s:.2f} s"
        )
    else:
        reason = (
            found.problem
            or f"two readers differ in {', '.join(found.differ) or 'nothing: it is empty'}"
        )
        echo(f"{chosen[0].name} does not restore: {reason}")
    return verdict.exit_code


@app.command()
def prune(
    root: Root,
    keep_last: Annotated[
        int, typer.Option(help="Number of newest snapshots to keep; 0 keeps all.")
    ] = 2,
    keep_every: Annotated[
        int, typer.Option(help="Also keep snapshots whose step is a multiple of this.")
    ] = 0,
    budget_gb: Annotated[
        float, typer.Option(help="All together, in GB (1e9 bytes); the oldest go first.")
    ] = 0.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")
    ] = False,
    endpoint: Endpoint = "",
    deadline_s: Deadline = 30.0,
    machine: Json = False,
) -> None:
    """Delete old snapshots, and what dead processes left half written.

    The newest snapshot stays, and so does the newest one whose digests are right,
    whatever the options say: it is read for that. Quarantine is left alone. Behind a
    URL uploads that are not complete stay, too: they go on where they stood.

    Example: [cyan]chaoskit checkpoint prune checkpoints --keep-last 3 --keep-every 1000[/]
    """
    from chaoskit.checkpoint.disk.retention import Retention

    if not 0 <= budget_gb < math.inf:
        raise BadInput("budget_gb", budget_gb, "use 0 or more, and a finite number")
    budget_bytes = int(budget_gb * 1e9)
    retention = Retention(keep_last=keep_last, keep_every=keep_every, budget_bytes=budget_bytes)
    with _opened(root, endpoint, deadline_s, retention) as tier:
        swept = [] if dry_run else tier.sweep()
        names = tier.doomed() if dry_run else tier.prune()
    if machine:
        print_json({"deleted": names, "swept": swept, "dry_run": dry_run})
        return
    for name in [*names, *swept]:
        echo(f"{'would delete' if dry_run else 'deleted'} {name}")
    if not (names or swept):
        echo("nothing to delete")


def _opened(
    root: str, endpoint: str, deadline_s: float, retention: Retention | None = None
) -> AbstractContextManager[Inspected]:
    from chaoskit.checkpoint.inspecting import opened

    return opened(root, endpoint=endpoint, deadline_s=deadline_s, retention=retention)


def _checked(tier: Inspected, step: int | None) -> Iterator[tuple[str, str | None]]:
    """Name and damage of the snapshots that are asked for, one after the other."""
    contents = tier.contents()
    for snapshot in _chosen(contents, step):
        yield snapshot.name, tier.verify(snapshot)
    for one in contents.damaged:
        if step in (None, one.step):
            yield one.name, one.reason


def _chosen(contents: Contents, step: int | None) -> list[Snapshot]:
    """The snapshots that are asked for, the newest first."""
    if step is None:
        return contents.snapshots
    of_step = [snapshot for snapshot in contents.snapshots if snapshot.manifest.step == step]
    if not of_step and not any(one.step == step for one in contents.damaged):
        known = ", ".join(str(one.manifest.step) for one in contents.snapshots)
        raise BadInput("step", step, f"use one of {known or 'none'}")
    return of_step[:1]


def _plain(snapshot: Snapshot) -> dict[str, Any]:
    manifest = snapshot.manifest
    return {
        "name": snapshot.name,
        "step": manifest.step,
        "generation": manifest.generation,
        "world": manifest.world,
        "size_bytes": manifest.size_bytes,
        "files": len(manifest.files),
        "tensors": sum(1 for items in snapshot.items.values() if items[0].dtype),
        "saved_at": manifest.saved_at,
    }


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
