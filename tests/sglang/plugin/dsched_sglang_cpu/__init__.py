"""Runs SGLang on a plain CPU for dsched's tests. Nothing here belongs to dsched's wheel."""
