"""One file per weight format; a format's identity is its numeric qtype."""
