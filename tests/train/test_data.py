"""If these fail, look in fsdp_tp/train/data.py: what the model is fed, and in which order."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tp.train.data import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    PackedSequences,
    StepSampler,
    find_files,
    read_documents,
    write_tokens,
)


def _tokens(files, cache, tokenizer=None, text_column="text"):
    path = write_tokens(files, tokenizer or ByteTokenizer(), cache, text_column=text_column)
    return np.fromfile(path, dtype=path.suffix[1:]).tolist()


def test_text_becomes_its_bytes_and_an_end_mark(tmp_path):
    (tmp_path / "a.txt").write_text("hé", encoding="utf-8")
    (tmp_path / "b.md").write_text("!")
    assert _tokens(find_files([tmp_path]), tmp_path / "cache") == [104, 195, 169, 256, 33, 256]


def test_rows_of_jsonl_and_parquet_become_documents(tmp_path):
    texts = ["one", "two\nlines", "", "drei ü"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t, "id": 1}) + "\n" for t in texts))
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "d.parquet")
    assert list(read_documents(tmp_path / "d.jsonl", "text")) == texts
    assert list(read_documents(tmp_path / "d.parquet", "body")) == texts
    expected = [token for text in texts if text for token in [*text.encode(), 256]]
    assert _tokens([tmp_path / "d.jsonl"], tmp_path / "c1") == expected
    assert _tokens([tmp_path / "d.parquet"], tmp_path / "c2", text_column="body") == expected


def test_unusable_rows_name_the_file(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(ValueError, match=r"d.jsonl cannot be read: has a row without text"):
        list(read_documents(tmp_path / "d.jsonl", "text"))
    (tmp_path / "broken.jsonl").write_text('{"text": ')
    with pytest.raises(ValueError, match="broken.jsonl cannot be read"):
        list(read_documents(tmp_path / "broken.jsonl", "text"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match="broken.parquet cannot be read"):
        list(read_documents(tmp_path / "broken.parquet", "text"))


def test_files(tmp_path):
    with pytest.raises(ValueError, match="data=.*nothing does not exist"):
        find_files([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="contains no files"):
        find_files([tmp_path])
    for name in ("b.txt", "a.txt", ".hidden"):
        (tmp_path / name).write_text("x")
    assert [file.name for file in find_files([tmp_path])] == ["a.txt", "b.txt"]


def test_by_default_it_reads_the_standard_library():
    files = find_files([])
    assert len(files) > 500
    assert sum(file.stat().st_size for file in files) > 10_000_000
    assert any(file.name == "argparse.py" for file in files)


def test_no_text_and_too_little_text(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "empty.jsonl").write_text("")
    path = write_tokens(find_files([tmp_path]), ByteTokenizer(), tmp_path / "cache", text_column="text")
    with pytest.raises(ValueError, match="the data files contain no text"):
        PackedSequences(path, 8)
    (tmp_path / "short.txt").write_text("12345")
    path = write_tokens([tmp_path / "short.txt"], ByteTokenizer(), tmp_path / "cache", text_column="text")
    with pytest.raises(ValueError, match="hold 6 tokens, fewer than the 9 of one sequence; sequence_length=8 can"):
        PackedSequences(path, 8)
    assert len(PackedSequences(path, 5)) == 1


def test_tokens_are_cached_until_the_input_changes(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    walks = []

    def progress(files):
        walks.append(list(files))
        return files

    def once():
        options = {"text_column": "text", "progress": progress}
        return write_tokens([tmp_path / "a.txt"], ByteTokenizer(), tmp_path / "cache", **options)

    assert once() == once()
    assert len(walks) == 1
    (tmp_path / "a.txt").write_text("second!")
    once()
    assert len(walks) == 2
    assert not list((tmp_path / "cache").glob(".*")), "no temporary file stays"


def test_windows_share_one_token_and_cover_the_text(tmp_path):
    text = bytes(range(97, 97 + 22)).decode()
    (tmp_path / "a.txt").write_text(text)
    path = write_tokens([tmp_path / "a.txt"], ByteTokenizer(), tmp_path / "cache", text_column="text")
    sequences = PackedSequences(path, 5)
    whole = torch.tensor([*text.encode(), 256])
    assert len(sequences) == 4
    for index in range(4):
        assert torch.equal(sequences[index], whole[5 * index : 5 * index + 6])
        assert sequences[index].dtype == torch.int64


def test_a_hugging_face_tokenizer_directory(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, "<unk>": 1, "hello": 2, "world": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>").save_pretrained(
        tmp_path / "t"
    )
    tokenizer = HuggingFaceTokenizer(tmp_path / "t")
    assert tokenizer.size == 4
    assert tokenizer.encode("hello big world") == [2, 1, 3, 0]
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="tokenizer=.*none cannot be loaded"):
        HuggingFaceTokenizer(tmp_path / "none")


@given(
    sequences=st.integers(1, 40),
    per_rank=st.integers(1, 3),
    data_size=st.sampled_from([1, 2, 4]),
    steps=st.integers(1, 12),
    seed=st.integers(0, 5),
)
def test_every_layout_reads_the_same_global_batches(sequences, per_rank, data_size, steps, seed):
    batch = per_rank * 4

    def read(size):
        samplers = [
            iter(StepSampler(sequences, batch, data_rank=rank, data_size=size, seed=seed)) for rank in range(size)
        ]
        return [[index for sampler in samplers for index in next(sampler)] for _ in range(steps)]

    batches = read(1)
    assert read(data_size) == batches
    order = [index for step in batches for index in step]
    for start in range(0, len(order) - sequences + 1, sequences):
        assert sorted(order[start : start + sequences]) == list(range(sequences)), "an epoch reads everything once"


def test_position_is_restored_on_another_layout():
    first = StepSampler(100, 8, data_rank=0, data_size=1, seed=0)
    iterator = iter(first)
    for _ in range(5):
        next(iterator)
    expected = next(iterator)
    second = StepSampler(100, 8, data_rank=1, data_size=2, seed=0)
    second.load_state_dict({"position": 5 * 8})
    assert next(iter(second)) == expected[4:]
