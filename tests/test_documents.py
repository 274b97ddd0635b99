"""The examples in the README and the documentation run and print what is written below them."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = [
    path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python" in path.read_text()
]


@pytest.mark.usefixtures("whole_searches")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_examples(document):
    default = torch.get_default_dtype()
    namespace, printed = {"__name__": "example"}, ""
    try:
        for kind, body in BLOCK.findall(document.read_text()):
            if kind == "text":
                assert printed == body
                printed = ""
                continue
            assert printed == "", "an example prints something that the document does not show"
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(body, str(document), "exec"), namespace)
            printed = output.getvalue()
        assert printed == ""
    finally:
        torch.set_default_dtype(default)


def test_there_are_documents():
    assert {"README.md", "errata.md"} <= {path.name for path in DOCUMENTS}
