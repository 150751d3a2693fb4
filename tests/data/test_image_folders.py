"""Images by client from folders and LEAF files."""

from __future__ import annotations

import json

import pytest
import torch

from coterie._core.errors import DataError
from coterie.data.image_folders import image_shape, read_images

pytest.importorskip("PIL", reason="needs coterie[images]")


def draw(path, value, size=(8, 6), mode="L"):
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def leaf(path, users):
    data = {name: {"x": [[0.5] * 784] * len(y), "y": y} for name, y in users.items()}
    sizes = [len(y) for y in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": sizes, "user_data": data}))


def test_a_folder_per_client_and_class(tmp_path):
    for client, name, value in (("b", "9", 0), ("b", "10", 255), ("a", "9", 51)):
        draw(tmp_path / client / name / "one.png", value)
    images = read_images(tmp_path)
    assert images.rows.names == ["a", "b"] and images.classes == ["9", "10"]  # numbers by size
    assert images.rows.xs[0].shape == (1, 1, 6, 8) and float(images.rows.xs[0][0, 0, 0, 0]) == pytest.approx(
        0.2
    )
    assert images.rows.ys[1].tolist() == [1, 0]
    assert image_shape(tmp_path) == (1, 6, 8)
    assert read_images(tmp_path, "b").rows.names == ["b"]


def test_the_pictures_of_one_client(tmp_path):
    draw(tmp_path / "cat" / "one.png", 1)
    draw(tmp_path / "dog" / "two.jpg", (1, 2, 3), mode="RGB")
    images = read_images(tmp_path, "anna")
    assert images.rows.names == ["anna"] and images.rows.xs[0].shape == (2, 3, 6, 8)
    assert read_images(tmp_path, "anna", channels=1).rows.xs[0].shape == (2, 1, 6, 8)


def test_leaf_files_are_images_with_whole_numbers_as_classes(tmp_path):
    leaf(tmp_path / "all.json", {"u1": [0, 2], "u2": [1]})
    images = read_images(tmp_path)
    assert images.classes == ["0", "1", "2"] and images.rows.xs[0].shape == (2, 1, 28, 28)
    assert read_images(tmp_path / "all.json", "u2").rows.ys[0].tolist() == [1]


def test_labels_follow_another_list_of_classes(tmp_path):
    draw(tmp_path / "a" / "cat" / "one.png", 0)
    images = read_images(tmp_path)
    assert torch.equal(images.relabelled(["ant", "cat"]).rows.ys[0], torch.tensor([1]))
    with pytest.raises(DataError, match="'cat' is not among"):
        images.relabelled(["ant"])


@pytest.mark.parametrize(
    ("files", "client", "words"),
    [
        ([], None, "no .png or .jpg"),
        (["cat/one.png"], None, "put pictures into client/class/"),
        (["a/cat/x/one.png"], None, "nothing deeper"),
        (["one.png"], "anna", "put those of 'anna' into class/"),
        (["a/cat/one.png"], "b", "no images of client 'b'"),
    ],
)
def test_folders_of_another_form_are_refused_with_a_remedy(tmp_path, files, client, words):
    for file in files:
        draw(tmp_path / file, 0)
    with pytest.raises(DataError, match=words):
        read_images(tmp_path, client)


def test_damaged_and_uneven_pictures_are_named(tmp_path):
    draw(tmp_path / "a" / "cat" / "one.png", 0)
    draw(tmp_path / "a" / "cat" / "two.png", 0, size=(9, 9))
    with pytest.raises(DataError, match=r"two\.png is 9x9"):
        read_images(tmp_path)
    (tmp_path / "a" / "cat" / "two.png").write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"two\.png is not a readable picture"):
        read_images(tmp_path)
    with pytest.raises(DataError, match="no images with classes"):
        leaf_text = {"users": ["u"], "num_samples": [1], "user_data": {"u": {"x": ["ab"], "y": ["c"]}}}
        (tmp_path / "text.json").write_text(json.dumps(leaf_text))
        read_images(tmp_path / "text.json")
