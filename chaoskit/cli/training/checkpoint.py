"""``chaoskit checkpoint``: list, verify and prune stored snapshots, and prove that they restore.

-> checkpoint/inspecting.py: the operations. checkpoint/disk/retention.py: the snapshots that stay.
-> checkpoint/disk/drill.py: the restore drill.
"""

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
    "List, verify and prune snapshots in a directory or at a URL, and prove that they restore."
)

#: Field of a store -> the argument that sets it.
FIELDS = {"url": "DIRECTORY", "root": "DIRECTORY"}

Root = Annotated[
    str,
    typer.Argument(
        metavar="DIRECTORY|URL",
        help="Directory of snapshots, as DiskTier and SnapshotWriter have it, or URL as RemoteTier has it: "
        "s3://bucket/run, gs://bucket/run, file:///mnt/run. Credentials come from the usual places: "
        "for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, or the role of the instance.",
    ),
]
Endpoint = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="For s3://: address of a store other than Amazon's, such as http://minio:9000.",
    ),
]
Deadline = Annotated[float, typer.Option(help="Remote stores: seconds to retry before failing.")]
Step = Annotated[int | None, typer.Option(help="Only the newest snapshot of this step.")]


@app.command("list")
def list_(
    root: Root, endpoint: Endpoint = "", deadline_s: Deadline = 30.0, is_json: Json = False
) -> None:
    """List the snapshots, the newest first, and those that are damaged or incomplete.

    Snapshots in quarantine are listed, too. Manifests are read, but no data files: see
    [bold]verify[/].

    Examples: [cyan]chaoskit checkpoint list checkpoints[/], [cyan]chaoskit checkpoint list
    s3://bucket/run --endpoint http://minio:9000[/]
    """
    with _open_tier(root, endpoint, deadline_s) as tier:
        contents = tier.contents()
    rows = [_plain(snapshot) for snapshot in contents.snapshots]
    damaged = [
        {"name": damaged_snapshot.name, "reason": damaged_snapshot.reason}
        for damaged_snapshot in contents.damaged
    ]
    if is_json:
        print_json(
            {
                "snapshots": rows,
                "damaged": damaged,
                "quarantine": contents.quarantine,
                "staging": contents.unfinished,
            }
        )
        return
    _print_snapshots(rows)
    for row in damaged:
        echo(f"{row['name']}  damaged: {row['reason']}")
    for name in contents.quarantine:
        echo(f"{name}  in quarantine")
    for name in contents.unfinished:
        echo(f"{name}  not complete")
    if not (rows or damaged):
        echo("no snapshots")


def _print_snapshots(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of complete snapshots."""
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
            "--quarantine",
            help="Move damaged snapshots to the quarantine, so that no restore uses them.",
        ),
    ] = False,
    endpoint: Endpoint = "",
    deadline_s: Deadline = 30.0,
    is_json: Json = False,
) -> int:
    """Read every byte of the snapshots, and compare the digests.

    Verifying a URL causes as much traffic as restoring all of its snapshots. Name a --step if
    traffic costs money.

    Exit code 0: all are whole, 1: some are damaged, 2: bad input, or a store that refuses or does
    not answer, 10: there is no snapshot to verify.

    Example: [cyan]chaoskit checkpoint verify checkpoints --quarantine[/]
    """
    verified: list[dict[str, Any]] = []
    with _open_tier(root, endpoint, deadline_s) as tier:
        for name, damage in _verify_snapshots(tier, step):
            path = tier.set_aside(name, damage) if damage and quarantine else tier.place(name)
            verified.append({"name": name, "path": path, "damage": damage})
            if not is_json:
                echo(f"{name}  {'damaged: ' + damage if damage else 'whole'}")
    failed = any(snapshot["damage"] for snapshot in verified)
    verdict = Verdict.FAILED if failed else Verdict.PASSED if verified else Verdict.UNKNOWN
    if is_json:
        print_json({"verdict": verdict, "snapshots": verified})
    elif not verified:
        echo("nothing to verify")
    return verdict.exit_code


@app.command("restore-drill")
def restore_drill(
    root: Root,
    step: Step = None,
    endpoint: Endpoint = "",
    deadline_s: Deadline = 30.0,
    is_json: Json = False,
) -> int:
    """Prove that a snapshot restores: load it in a fresh process, and compare.

    Every tensor is loaded twice, with chaoskit's reader and with plain
    torch.distributed.checkpoint, and the bits of both are compared. Like every load with torch,
    this unpickles the file .metadata: use it on your own snapshots.

    A snapshot at a URL is first downloaded and verified, into a directory below $TMPDIR that is
    removed afterwards.

    Exit code 0: it restores, 1: it does not, 2: bad input, or a store that refuses or does not
    answer, 10: there is no snapshot to restore.

    Examples: [cyan]chaoskit checkpoint restore-drill checkpoints --step 1200[/], [cyan]chaoskit
    checkpoint restore-drill s3://bucket/run[/]
    """
    with _open_tier(root, endpoint, deadline_s) as tier:
        selected = _select_snapshots(tier.contents(), step)[:1]
        drills = [tier.drill(snapshot) for snapshot in selected]
    if not drills:
        if is_json:
            print_json({"verdict": Verdict.UNKNOWN})
        else:
            echo("nothing to restore")
        return Verdict.UNKNOWN.exit_code
    drill = drills[0]
    verdict = Verdict.PASSED if drill.passed else Verdict.FAILED
    if is_json:
        import msgspec

        print_json({"verdict": verdict, "name": selected[0].name, **msgspec.to_builtins(drill)})
    elif drill.passed:
        parts = f"{drill.tensors} tensors and {drill.objects} objects, {_size(drill.size_bytes)}"
        before = f"downloaded in {drill.download_s:.2f} s; " if drill.download_s else ""
        echo(
            f"{selected[0].name} restores: {parts}; {before}{drill.ours_s:.2f} s, with plain torch {drill.torch_s:.2f} s"
        )
    else:
        difference = f"two readers differ in {', '.join(drill.differ)}"
        reason = drill.problem or (difference if drill.differ else "the snapshot is empty")
        echo(f"{selected[0].name} does not restore: {reason}")
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
        float,
        typer.Option(
            help="Total size to keep, in GB (1e9 bytes); the oldest are deleted first. 0: no limit."
        ),
    ] = 0.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the snapshots to delete, and delete none.")
    ] = False,
    endpoint: Endpoint = "",
    deadline_s: Deadline = 30.0,
    is_json: Json = False,
) -> None:
    """Delete old snapshots, and incomplete ones that dead processes have left.

    The newest snapshot and the newest snapshot with correct digests always stay. The digests are
    checked, which reads the snapshot. The quarantine is not changed. Incomplete uploads at a URL
    stay, too, and can be resumed. [bold]--dry-run[/] does not list incomplete snapshots.

    Example: [cyan]chaoskit checkpoint prune checkpoints --keep-last 3 --keep-every 1000[/]
    """
    from chaoskit.checkpoint.disk.retention import Retention

    if not 0 <= budget_gb < math.inf:
        raise BadInput("budget_gb", budget_gb, "use 0 or more, and a finite number")
    budget_bytes = int(budget_gb * 1e9)
    retention = Retention(keep_last=keep_last, keep_every=keep_every, budget_bytes=budget_bytes)
    with _open_tier(root, endpoint, deadline_s, retention) as tier:
        swept = [] if dry_run else tier.sweep()
        names = tier.doomed() if dry_run else tier.prune()
    if is_json:
        print_json({"deleted": names, "swept": swept, "dry_run": dry_run})
        return
    for name in [*names, *swept]:
        echo(f"{'would delete' if dry_run else 'deleted'} {name}")
    if not (names or swept):
        echo("nothing to delete")


def _open_tier(
    root: str, endpoint: str, deadline_s: float, retention: Retention | None = None
) -> AbstractContextManager[Inspected]:
    """Return a context manager that opens the directory or the store of snapshots.

    Args:
        retention: the snapshots to keep, for :meth:`Inspected.prune`.
    """
    from chaoskit.checkpoint.inspecting import opened

    return opened(root, endpoint=endpoint, deadline_s=deadline_s, retention=retention)


def _verify_snapshots(tier: Inspected, step: int | None) -> Iterator[tuple[str, str | None]]:
    """Yield name and damage of each selected snapshot.

    The damage is None if the snapshot is whole. All data of whole snapshots is read.
    """
    contents = tier.contents()
    for snapshot in _select_snapshots(contents, step):
        yield snapshot.name, tier.verify(snapshot)
    for damaged in contents.damaged:
        if step in (None, damaged.step):
            yield damaged.name, damaged.reason


def _select_snapshots(contents: Contents, step: int | None) -> list[Snapshot]:
    """Return all snapshots, the newest first, or only the newest snapshot of a step.

    The result is empty if all snapshots of the step are damaged. Raise BadInput if the step does
    not exist.
    """
    if step is None:
        return contents.snapshots
    of_step = [snapshot for snapshot in contents.snapshots if snapshot.manifest.step == step]
    if not of_step and not any(damaged.step == step for damaged in contents.damaged):
        steps = ", ".join(str(snapshot.manifest.step) for snapshot in contents.snapshots)
        raise BadInput("step", step, f"use one of {steps or 'none'}")
    return of_step[:1]


def _plain(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as JSON values."""
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
    """Format a size in MB or GB."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
