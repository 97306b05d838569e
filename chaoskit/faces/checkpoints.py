"""``chaoskit checkpoint``: what is stored below a directory, whether it is whole, and whether it restores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chaoskit.errors import BadInput
from chaoskit.faces.ending import print_json
from chaoskit.vocabulary import Verdict

if TYPE_CHECKING:
    from chaoskit.checkpoint.disk import DiskTier
    from chaoskit.checkpoint.snapshot import Snapshot

app = typer.Typer(
    help="Look at stored snapshots, verify them, and prove that they restore.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Root = Annotated[Path, typer.Argument(help="Directory of snapshots, as DiskTier and SnapshotWriter have it.")]
Step = Annotated[int | None, typer.Option(help="Only the newest snapshot of this step.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]


@app.command("list")
def list_(root: Root, machine: Json = False) -> None:
    """List the snapshots, the newest first, and what is damaged, in quarantine or being written.

    Manifests are read, data files are not: see [bold]verify[/].

    Example: [cyan]chaoskit checkpoint list checkpoints[/]
    """
    from chaoskit.checkpoint.names import QUARANTINE, STAGING

    tier = _tier(root)
    listing = tier.snapshots()
    rows = [_plain(snapshot) for snapshot in listing.snapshots]
    damaged = [{"name": one.name, "reason": one.reason} for one in listing.damaged]
    aside = [path.name for path in sorted((root / QUARANTINE).glob("*"))]
    writing = [path.name for path in sorted((root / STAGING).glob("*"))]
    if machine:
        print_json({"snapshots": rows, "damaged": damaged, "quarantine": aside, "staging": writing})
        return
    for row in rows:
        size, world = _size(row["size_bytes"]), f"{row['world']} rank{'s' if row['world'] != 1 else ''}"
        typer.echo(f"{row['name']}  {size:>9}  {world:>9}  {row['tensors']} tensors  {row['saved_at']}")
    for one in damaged:
        typer.echo(f"{one['name']}  damaged: {one['reason']}")
    for name in aside:
        typer.echo(f"quarantine/{name}")
    for name in writing:
        typer.echo(f".staging/{name}  not complete")
    if not (rows or damaged):
        typer.echo("no snapshots")


@app.command()
def verify(
    root: Root,
    step: Step = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Set aside what is damaged, so that no restore tries it.")
    ] = False,
    machine: Json = False,
) -> int:
    """Read every byte of the snapshots, and compare the digests.

    Exit code 0: all are whole, 1: some are damaged, 2: bad input, 10: there is
    nothing to verify.

    Example: [cyan]chaoskit checkpoint verify checkpoints --quarantine[/]
    """
    tier = _tier(root)
    listing = tier.snapshots()
    found: list[dict[str, Any]] = []
    for snapshot in _chosen(tier, step):
        damage = tier.verify(snapshot)
        found.append({"name": snapshot.name, "path": str(snapshot.path), "damage": damage})
    found += [
        {"name": one.name, "path": str(one.path), "damage": one.reason}
        for one in listing.damaged
        if step in (None, one.step)
    ]
    for one in found:
        if one["damage"] and quarantine:
            one["path"] = str(tier.quarantine(Path(one["path"]), one["damage"]).path)
        if not machine:
            typer.echo(f"{one['name']}  {'damaged: ' + one['damage'] if one['damage'] else 'whole'}")
    failed = any(one["damage"] for one in found)
    verdict = Verdict.FAILED if failed else Verdict.PASSED if found else Verdict.UNKNOWN
    if machine:
        print_json({"verdict": verdict, "snapshots": found})
    elif not found:
        typer.echo("nothing to verify")
    return verdict.exit_code


@app.command("restore-drill")
def restore_drill(root: Root, step: Step = None, machine: Json = False) -> int:
    """Prove that a snapshot restores: load it in a fresh process, and compare.

    Every tensor is loaded twice, with chaoskit's reader and with plain
    torch.distributed.checkpoint, and the bits of both are compared. Like every
    load with torch, this unpickles the file .metadata: use it on your own snapshots.

    Exit code 0: it restores, 1: it does not, 2: bad input, 10: there is nothing
    to restore.

    Example: [cyan]chaoskit checkpoint restore-drill checkpoints --step 1200[/]
    """
    from chaoskit.checkpoint.drill import drill

    chosen = _chosen(_tier(root), step)
    if not chosen:
        if machine:
            print_json({"verdict": Verdict.UNKNOWN})
        else:
            typer.echo("nothing to restore")
        return Verdict.UNKNOWN.exit_code
    found = drill(chosen[0].path)
    verdict = Verdict.PASSED if found.passed else Verdict.FAILED
    if machine:
        import msgspec

        print_json({"verdict": verdict, "name": chosen[0].name, **msgspec.to_builtins(found)})
    elif found.passed:
        parts = f"{found.tensors} tensors and {found.objects} objects, {_size(found.size_bytes)}"
        typer.echo(f"{chosen[0].name} restores: {parts}; {found.ours_s:.2f} s, with plain torch {found.torch_s:.2f} s")
    else:
        reason = found.problem or f"two readers differ in {', '.join(found.differ) or 'nothing: it is empty'}"
        typer.echo(f"{chosen[0].name} does not restore: {reason}")
    return verdict.exit_code


@app.command()
def prune(
    root: Root,
    keep_last: Annotated[int, typer.Option(help="So many of the newest stay; 0 for all.")] = 2,
    keep_every: Annotated[int, typer.Option(help="Those whose step is a multiple of it stay, too.")] = 0,
    budget_gb: Annotated[float, typer.Option(help="All together, in GB (1e9 bytes); the oldest go first.")] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")] = False,
    machine: Json = False,
) -> None:
    """Delete old snapshots, and what dead processes left half written.

    The newest snapshot stays, and so does the newest one whose digests are right,
    whatever the options say. Quarantine is left alone.

    Example: [cyan]chaoskit checkpoint prune checkpoints --keep-last 3 --keep-every 1000[/]
    """
    from chaoskit.checkpoint.retention import Retention

    budget_bytes = int(budget_gb * 1e9)
    tier = _tier(root, Retention(keep_last=keep_last, keep_every=keep_every, budget_bytes=budget_bytes))
    swept = [] if dry_run else tier.sweep()
    names = [snapshot.name for snapshot in tier.doomed()] if dry_run else tier.prune()
    if machine:
        print_json({"deleted": names, "swept": swept, "dry_run": dry_run})
        return
    for name in [*names, *swept]:
        typer.echo(f"{'would delete' if dry_run else 'deleted'} {name}")
    if not (names or swept):
        typer.echo("nothing to delete")


def _tier(root: Path, retention: Any = None) -> DiskTier:
    if not root.is_dir():
        raise BadInput("root", str(root), "name a directory of snapshots")
    from chaoskit.checkpoint.disk import DiskTier

    return DiskTier(root, retention=retention)


def _chosen(tier: DiskTier, step: int | None) -> list[Snapshot]:
    """The snapshots that are asked for, the newest first."""
    found = tier.snapshots().snapshots
    if step is None:
        return found
    of_step = [snapshot for snapshot in found if snapshot.manifest.step == step]
    if not of_step and not any(one.step == step for one in tier.snapshots().damaged):
        raise BadInput("step", step, f"use one of {', '.join(str(one.manifest.step) for one in found) or 'none'}")
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
