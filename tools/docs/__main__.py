"""`python -m tools.docs`, which `make docs` runs: writes every page and picture that is made from the code."""

from tools.docs import DOCS, pictures, references

if __name__ == "__main__":
    for name, text in {**references(), **pictures()}.items():
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"docs/{name} is new")
