"""Posts by user and plays by role, from XML."""

import pytest
import torch

from coterie._core.errors import DataError, SettingError
from coterie.data.leaf_files import LETTERS
from coterie.data.xml_texts import plays, stackexchange
from coterie.experiments.spec import shared_data

POSTS = """<?xml version="1.0" encoding="utf-8"?>
<posts>
  <row Id="1" PostTypeId="1" OwnerUserId="7" Title="Grind size"
    Body="&lt;p&gt;How &lt;b&gt;fine&lt;/b&gt; to grind?&lt;/p&gt;" Tags="&lt;grinding&gt;&lt;drip&gt;" />
  <row Id="2" PostTypeId="2" ParentId="1" OwnerUserId="8" Body="Fine for espresso" />
  <row Id="3" PostTypeId="1" OwnerUserId="7" Title="More" Body="grind" Tags="|drip|" />
  <row Id="4" PostTypeId="1" OwnerUserId="9" Title="Rare" Body="other" Tags="|tea|" />
  <row Id="5" PostTypeId="5" OwnerUserId="7" Body="a wiki page" />
  <row Id="6" PostTypeId="1" Title="nobody" Body="grind" Tags="|drip|" />
</posts>
"""
PLAY = """<PLAY><ACT><SCENE>
<SPEECH><SPEAKER>ANN</SPEAKER><LINE>To be or not</LINE><LINE><STAGEDIR>Aside</STAGEDIR>to be</LINE></SPEECH>
<SPEECH><SPEAKER>BOB</SPEAKER><LINE>No</LINE></SPEECH>
<SPEECH><SPEAKER>ANN</SPEAKER><SPEAKER>CY</SPEAKER><LINE>Yes, yes, yes</LINE></SPEECH>
</SCENE></ACT></PLAY>"""


def test_posts_become_bags_of_words_with_the_commonest_tag(tmp_path):
    (tmp_path / "coffee.Posts.xml").write_text(POSTS, encoding="utf-8-sig")
    clients = stackexchange(tmp_path, words=4, tags=2, min_posts=1)
    assert clients.names == ["coffee/7", "coffee/8"] and clients.cluster_names == ["coffee"]
    assert [y.tolist() for y in clients.ys] == [[0, 0], [0]]
    assert all(torch.allclose(x.norm(dim=1), torch.ones(len(x))) for x in clients.xs)
    assert len(stackexchange(tmp_path, min_posts=2)) == 1
    with pytest.raises(DataError, match="no user has 5 posts"):
        stackexchange(tmp_path, min_posts=5)


def test_roles_become_windows_of_letters(tmp_path):
    (tmp_path / "play.xml").write_text(PLAY)
    clients = plays(tmp_path, length=5, stride=3, min_rows=2)
    assert clients.names == ["play/ANN", "play/CY"] and clients.cluster_names == ["play"]
    text = "To be or not\nAsideto be\nYes, yes, yes"
    first = "".join(LETTERS[k] for k in clients.xs[0][1])
    assert first == text[3:8] and LETTERS[clients.ys[0][1]] == text[8]
    assert len(clients.xs[0]) == (len(text) - 6) // 3 + 1
    assert len(plays(tmp_path, length=5, stride=3, min_rows=2, max_rows=3, max_clients=1).xs[0]) == 3


def test_bad_files_and_numbers_are_named(tmp_path):
    (tmp_path / "x.Posts.xml").write_text("<posts><row")
    with pytest.raises(DataError, match=r"x\.Posts\.xml is no readable XML"):
        stackexchange(tmp_path)
    with pytest.raises(SettingError, match="words=0"):
        stackexchange(tmp_path, words=0)
    with pytest.raises(SettingError, match="stride=0"):
        plays(tmp_path, stride=0)
    with pytest.raises(DataError, match="holds no"):
        (tmp_path / "empty").mkdir()
        plays(tmp_path / "empty")


@pytest.mark.slow
def test_the_archives_at_hand():
    try:
        posts, text = shared_data("stackexchange.tar.xz"), shared_data("shakespeare.tar.xz")
    except DataError:
        pytest.skip("needs ../shared/data")
    found = stackexchange(posts)
    assert len(found) > 100 and int(max(y.max() for y in found.ys)) == 49
    assert len(plays(text, max_clients=50)) == 50
