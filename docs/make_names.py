"""Write docs/names.md from the table of other libraries' names."""

from pathlib import Path

from headrace.config.foreign_names import names_page

if __name__ == "__main__":
    (Path(__file__).parent / "names.md").write_text(names_page(), encoding="utf-8")
