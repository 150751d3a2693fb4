"""Readers for text in XML: posts of Stack Exchange sites by user, and Shakespeare's plays by speaking role."""

from __future__ import annotations

import html
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import numpy as np
import torch

from coterie._core.errors import DataError, SettingError
from coterie.data.clients import Clients
from coterie.data.files import existing, members
from coterie.data.leaf_files import LETTERS

_WORD = re.compile(r"[a-z][a-z+#-]+")
_MARKUP = re.compile(r"<[^>]*>")
_TAG = re.compile(r"[^<>|]+")


@dataclass(frozen=True)
class _Post:
    """A post: who wrote it where, its words, and its tags."""

    site: str
    user: str
    words: frozenset[str]
    tags: tuple[str, ...]


def stackexchange(path: str | Path, words: int = 500, tags: int = 50, min_posts: int = 10) -> Clients:
    """Read posts as bags of words, with the commonest tag as target; every active user is a client.

    An answer has the tags of its question. Posts without any of the commonest tags are left out.

    Parameters
    ----------
    path
        A folder or tar archive of Posts.xml files, one per site.
    words
        How many of the commonest words are inputs; the 0/1 inputs of a post are scaled to length one.
    tags
        How many of the commonest tags are classes; a post's class is the commonest of its tags.
    min_posts
        Posts that a user needs to be a client.

    Returns
    -------
    Clients
        Users, clustered by site.
    """
    for name, value in (("words", words), ("tags", tags), ("min_posts", min_posts)):
        if value < 1:
            raise SettingError(f"{name}={value}; it must be at least 1")
    posts = [post for site, root in _documents(path, ".Posts") for post in _posts(site, root)]
    counts = Counter(tag for post in posts for tag in post.tags)
    rank = {tag: k for k, (tag, _) in enumerate(_commonest(counts, tags))}
    posts = [post for post in posts if any(tag in rank for tag in post.tags)]
    active = Counter((post.site, post.user) for post in posts)
    posts = [post for post in posts if active[post.site, post.user] >= min_posts]
    if not posts:
        raise DataError(f"{path}: no user has {min_posts} posts with one of the {tags} commonest tags")
    seen = Counter(word for post in posts for word in post.words)
    place = {word: k for k, (word, _) in enumerate(_commonest(seen, words))}
    by_user: dict[tuple[str, str], list[_Post]] = defaultdict(list)
    for post in posts:
        by_user[post.site, post.user].append(post)
    users, sites = sorted(by_user), sorted({site for site, _ in by_user})
    xs, ys = [], []
    for user in users:
        x = torch.zeros(len(by_user[user]), len(place))
        for row, post in enumerate(by_user[user]):
            x[row, [place[word] for word in post.words if word in place]] = 1.0
        xs.append(x / x.norm(dim=1, keepdim=True).clamp_min(1.0))
        ys.append(torch.tensor([min(rank[t] for t in post.tags if t in rank) for post in by_user[user]]))
    clusters = torch.tensor([sites.index(site) for site, _ in users])
    return Clients(xs, ys, [f"{site}/{user}" for site, user in users], clusters, sites)


def _commonest(counts: Counter[str], most: int) -> list[tuple[str, int]]:
    """Return the commonest words by count, then by name, so that ties do not depend on the order of files."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]


def _posts(site: str, root: ElementTree.Element) -> Iterator[_Post]:
    """Yield the posts of one site that have an author and tags."""
    rows = list(root.iter("row"))
    tags = {row.get("Id"): tuple(_TAG.findall(row.get("Tags") or "")) for row in rows}
    for row in rows:
        user, kind = row.get("OwnerUserId"), row.get("PostTypeId")
        own = tags.get(row.get("Id") if kind == "1" else row.get("ParentId"), ())
        if user is not None and kind in ("1", "2") and own:
            text = f"{row.get('Title') or ''} {_MARKUP.sub(' ', row.get('Body') or '')}"
            yield _Post(site, user, frozenset(_WORD.findall(html.unescape(text).lower())), own)


def plays(
    path: str | Path,
    length: int = 20,
    stride: int = 5,
    min_rows: int = 100,
    max_rows: int | None = None,
    max_clients: int | None = None,
) -> Clients:
    """Read plays in XML for next-character prediction; every speaking role is a client.

    Parameters
    ----------
    path
        A folder or tar archive of plays (PLAY/ACT/SCENE/SPEECH/SPEAKER/LINE).
    length
        Characters per row; the target is the character that follows.
    stride
        A row starts every `stride` characters of what the role says.
    min_rows
        Rows that a role needs to be a client.
    max_rows
        Keep at most this many rows per role.
    max_clients
        Keep at most this many roles, the longest first.

    Returns
    -------
    Clients
        Roles, clustered by play; characters are indices into `leaf_files.LETTERS`.
    """
    for name, value in (("length", length), ("stride", stride), ("min_rows", min_rows)):
        if value < 1:
            raise SettingError(f"{name}={value}; it must be at least 1")
    speeches: dict[tuple[str, str], list[str]] = defaultdict(list)
    for play, root in _documents(path, ""):
        for speech in root.iter("SPEECH"):
            lines = ["".join(line.itertext()).strip() for line in speech.iter("LINE")]
            for speaker in speech.findall("SPEAKER"):
                role = (speaker.text or "").strip()
                if role:
                    speeches[play, role].append("\n".join(lines))
    rows = {role: _windows("\n".join(lines), length, stride) for role, lines in speeches.items()}
    roles = sorted((role for role in rows if len(rows[role]) >= min_rows), key=lambda r: (-len(rows[r]), r))
    roles = roles[:max_clients]
    if not roles:
        raise DataError(f"{path}: no speaking role has {min_rows} rows of {length} characters")
    titles = sorted({play for play, _ in roles})
    tables = [torch.from_numpy(rows[role][:max_rows]) for role in roles]
    return Clients(
        [table[:, :-1].contiguous() for table in tables],
        [table[:, -1].contiguous() for table in tables],
        [f"{play}/{role}" for play, role in roles],
        torch.tensor([titles.index(play) for play, _ in roles]),
        titles,
    )


def _windows(text: str, length: int, stride: int) -> np.ndarray:
    """Return rows of length + 1 letters, int64."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    table = np.full(129, len(LETTERS))
    table[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))
    letters = table[np.minimum(codes, 128)].astype(np.int64)
    if len(letters) <= length:
        return np.zeros((0, length + 1), np.int64)
    return np.lib.stride_tricks.sliding_window_view(letters, length + 1)[::stride].copy()


def _documents(path: str | Path, ending: str) -> Iterator[tuple[str, ElementTree.Element]]:
    """Yield name and root of every XML file, sorted by name."""
    wanted = f"{ending}.xml"

    def chosen(name: PurePosixPath) -> bool:
        return name.name.endswith(wanted)

    found = sorted(members(existing(path), chosen))
    if not found:
        raise DataError(f"{path} holds no *{wanted} files")
    for name, raw in found:
        try:
            yield name.name.removesuffix(wanted), ElementTree.fromstring(raw)
        except ElementTree.ParseError as error:
            raise DataError(f"{path}: {name} is no readable XML ({error}); fetch it again") from None
