"""Tries the checks of the move with planted mistakes, in a moved tree: ``selftest.py TREE``. Each must be noticed."""
import subprocess, sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, str(Path(__file__).parent))
import checks, move

T = Path(sys.argv[1]).resolve()
files = set(subprocess.run(["git", "-C", str(T), "ls-tree", "-r", "--name-only", "-z", "HEAD"], capture_output=True, text=True).stdout.split("\0")) - {""}
m = move.Moves(files)
texts = move.Texts(m)
new = {n: "" for n in m.paths.values()} | {f"{f}/__init__.py": "" for f in m.docs}
done = SimpleNamespace(tree=T, moves=m, new=new, options=SimpleNamespace(keep_going=True), problems=[])
failed = []

def must(what, found):
    print("noticed" if found else "NOT NOTICED", "-", what, "-", str(found)[:110])
    if not found: failed.append(what)

for what, more in (("a file that the map does not know", {"chaoskit/new.py"}), ("a test that it does not know", {"tests/test_new.py"})):
    try: move.Moves(files | more); must(what, "")
    except move.Refused as error: must(what, error)
try: move.Moves(files - {"chaoskit/wire.py"}); must("a file that is gone", "")
except move.Refused as error: must("a file that is gone", error)

def differs(old, new, path="chaoskit/control/hang.py"):
    import ast
    source = move.Source(path, m.paths[path], old, m, texts)
    return source, move.difference(source.tree, ast.parse(new(source.new)), source)
old = 'from chaoskit import osprocess\nfrom chaoskit.control.events import X\n\nNAME = "chaoskit.control.agent:run"\n\n\ndef f(a):\n    """One."""\n    return osprocess.x(a, 1)\n'
source, found = differs(old, lambda text: text)
print(source.new)
must("(nothing: the move itself is no difference)", not found)
for what, change in (
    ("a changed number", lambda t: t.replace("1)", "2)")),
    ("a dropped statement", lambda t: t.replace('    """One."""\n', "")),
    ("a changed docstring", lambda t: t.replace("One.", "Two.")),
    ("a module name in a string that is mapped wrongly", lambda t: t.replace("chaoskit.agent.agent:run", "chaoskit.coordinator.agent:run")),
    ("a module name that is not mapped", lambda t: t.replace("chaoskit.agent.agent:run", "chaoskit.control.agent:run")),
    ("a name of a module that is not renamed", lambda t: t.replace("linux.x", "osprocess.x")),
):
    must(what, differs(old, change)[1])

def planted(path, change, check):
    file = T / path
    before = file.read_text()
    try:
        file.write_text(change(before))
        return list(check())
    finally:
        file.write_text(before)
append = lambda text: lambda before: before + text
lo = lambda: checks.left_over(done)
must("an old module name in a page", planted("docs/gpu.md", append("\n`chaoskit.control.agent`\n"), lo))
must("an old package in a page", planted("docs/gpu.md", append("\nsee chaoskit.control for more\n"), lo))
must("an old path in a comment", planted("chaoskit/errors.py", append("# see control/agent.py\n"), lo))
must("an old folder in a page", planted("docs/gpu.md", append("\nin `control/`\n"), lo))
must("an old test in a setting", planted("tox.ini", append("; tests/test_simulation.py\n"), lo))
must("an old bare file name", planted("docs/gpu.md", append("\n`keeper_line.py`\n"), lo))
must("a module that is a package now", planted("docs/gpu.md", append("\n`chaoskit.wire.Splitter`\n"), lo))
must("an import of nothing", planted("chaoskit/errors.py", append("from chaoskit.wire.frames import Nothing\n"), lambda: checks.unresolved(T, ["chaoskit/errors.py"])))
must("a text of code with a module that is gone", planted("chaoskit/errors.py", append('X = "chaoskit.agent.nothing:run"\n'), lambda: checks.unresolved(T, ["chaoskit/errors.py"])))
neg = lambda: checks.negatives(done)
must("UNDER_TEST without a module", planted("chaoskit/plain.py", lambda t: t.replace('    "chaoskit.wire.lease",\n', ""), neg))
must("UNDER_TEST with a module that is gone", planted("chaoskit/plain.py", lambda t: t.replace('"chaoskit.wire.lease"', '"chaoskit.wire.leas"'), neg))
must("a contract without a module", planted("pyproject.toml", lambda t: t.replace('    "chaoskit.runlog",\n    "chaoskit.runtime",\n    "chaoskit.settings_file"', '    "chaoskit.runtime",\n    "chaoskit.settings_file"'), neg))
must("CORES without a folder", planted(m.paths["tests/mutants.py"], lambda t: t.replace('    "chaoskit/daemon",\n', ""), neg))
must("layers the other way round", planted("pyproject.toml", lambda t: t.replace('    "(chaoskit.runtime)",\n    "(chaoskit.data)",\n', '    "(chaoskit.data)",\n    "(chaoskit.runtime)",\n'), neg))
must("a group of conftest that names nothing", planted("conftest.py", lambda t: t.replace("substrates/test_docker", "substrates/test_dock_"), neg))
must("a job that is nowhere", planted(m.paths["tests/test_acts.py"], append('X = "../jobs/failing/troubled.py"\n'), lambda: checks.jobs(T)))
must("a link that leads nowhere", planted("docs/gpu.md", append("\n[x](canary.md)\n"), lambda: checks.links(T)))
sys.exit(f"{len(failed)} not noticed: {failed}" if failed else 0)
