"""Telling what a file is from its first bytes, also when it is not what its name promises."""

from __future__ import annotations

from hipfire.checkpoint import gguf_header, hfq_layout

SAMPLE = 512  # bytes that `describe` wants to see, fewer if the file has no more


def describe(head: bytes) -> str:
    """Return what a file starting with `head` is, as "a ..." or "an ...", or "" if that cannot be told."""
    text = head.lstrip().lower()
    if not head:
        return "an empty file"
    if head.startswith(hfq_layout.MAGIC):
        return "an HFQM container"
    if head.startswith(gguf_header.MAGIC):
        return "a GGUF file"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive (a PyTorch pickle checkpoint, most likely)"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a Python pickle"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself"
    if text.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    if head.startswith((b"ggml", b"ggjt", b"ggla", b"lmgg", b"tjgg", b"fmgg", b"ggmf")):
        return "a model in a format older than GGUF"
    return ""


def advice(what: str) -> str:
    """Return the hint that goes with a description."""
    if "pickle" in what:
        return "use a checkpoint saved as safetensors: pickles can run code and are not read"
    if "LFS" in what or "HTML" in what or "empty" in what:
        return "the download did not fetch the model: fetch it again"
    if "older" in what:
        return "convert the model to GGUF again"
    return "give an HFQM container, a GGUF file or a safetensors folder"
