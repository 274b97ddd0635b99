import csv
import json

import pytest

from gramcert.experiments.records import Records


def opened(folder, settings=None, columns=("a",), key=("a",)):
    return Records(folder, "name", settings or {}, columns, key)


def test_rows_are_kept_as_json_and_csv_and_found_again(tmp_path):
    records = opened(tmp_path / "new", {"size": (1, 2)}, ("a", "b"))
    records.add([{"a": 1, "b": None}])
    records.add([{"a": 2, "b": 0.5}], lambda rows: [{"count": len(rows)}])
    again = opened(tmp_path / "new", {"size": (1, 2)}, ("a", "b"))
    assert again.rows == [{"a": 1, "b": None}, {"a": 2, "b": 0.5}]
    assert again.has(a=2)
    assert again.has(a=2, b=0.5)
    assert not again.has(a=2, b=None)
    assert json.loads(records.path(".json").read_text())["summary"] == [{"count": 2}]
    with records.path(".csv").open() as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": ""}, {"a": "2", "b": "0.5"}]


def test_rows_of_several_processes_are_all_kept(tmp_path):
    first, second = (opened(tmp_path) for _ in range(2))
    first.add([{"a": 1}])
    second.add([{"a": 2}])
    first.add([{"a": 3}])
    assert first.rows == opened(tmp_path).rows == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_rows_of_other_settings_are_not_mixed(tmp_path):
    opened(tmp_path, {"epochs": 1}).add([{"a": 1}])
    with pytest.raises(ValueError, match="holds rows of other settings, epochs=1; choose"):
        opened(tmp_path, {"epochs": 2})


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"settings": {}}', "no json", "[" * 100_000, '{"settings": [1], "rows": []}'),
        *(
            '{"settings": {}, "rows": [{}]}',
            '{"settings": {}, "rows": [1]}',
            '{"settings": {}, "rows": [{"a": 1, "b": 2}]}',
        ),
    ],
)
def test_files_that_are_something_else_are_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "name.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="expected the rows of name"):
        opened(tmp_path)
    assert path.read_text() == content


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="not a folder that can be written"):
        opened(tmp_path / "file")


def test_a_row_is_there_once(tmp_path):
    """Two processes may have worked on the same."""
    first, second = (opened(tmp_path, columns=("a", "b")) for _ in range(2))
    first.add([{"a": 1, "b": 1}])
    second.add([{"a": 1, "b": 2}, {"a": 2, "b": 2}])
    assert second.rows == opened(tmp_path, columns=("a", "b")).rows == [{"a": 1, "b": 1}, {"a": 2, "b": 2}]


def test_rows_of_other_images_are_not_mixed(tmp_path):
    first, second = opened(tmp_path), opened(tmp_path)
    first.require_data("one")
    first.add([{"a": 1}])
    second.require_data("two")
    with pytest.raises(ValueError, match=r"name\.json: holds rows of other images; choose another folder"):
        second.add([{"a": 2}])
    again = opened(tmp_path)
    with pytest.raises(ValueError, match="holds rows of other images"):
        again.require_data("two")
    again.require_data("one")
    again.add([{"a": 2}])
    assert opened(tmp_path).rows == [{"a": 1}, {"a": 2}]


def test_a_table_that_was_not_written_is_written_later(tmp_path):
    records = opened(tmp_path)
    records.add([{"a": 1}])
    records.path(".csv").unlink()
    leftover = tmp_path / ".name.json.123.unfinished"
    leftover.touch()
    opened(tmp_path)
    assert records.path(".csv").read_text() == "a\n1\n"
    assert not leftover.exists()
