"""Name the folders that tests read from."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the repository
TESTS = ROOT / "tests"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
FOREIGN = TESTS / "support" / "foreign"  # environments and tool servers as other packages' users write them
