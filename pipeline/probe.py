"""Short texts on which tokenizer libraries have been seen to differ, or to fail."""

NASTY = (
    "",
    "\x00",
    " ",
    "\n",
    "a",
    # normal forms: composed, decomposed, compatibility, stacked and misplaced marks
    "\u00e9 e\u0301 \u1e69 s\u0323\u0307 s\u0307\u0323",
    "\u1100\u1161\u11a8 \uac01 \u212b \ufb01 \uff26 \u0344 \u0958",
    "\u0301a \U0001d54f\u0301\u0327\u0301",
    # unassigned, private, tags, the last one, the replacement
    "\u0378\u0ff0 \U0003fffe \U000e0001 \U0010ffff \ue000 \ufffd",
    # invisible, and every kind of blank and line end
    "a\u200bb\u200dc\ufeffd\u2060e\u00adf",
    "x\u00a0y\u2003z\u3000 \u3000\u3000a",
    "x\r\ny\r\r\nz\n\r \r",
    " \t \n  \n\n   a",
    "\x85\u2028\u2029\x0b\x0c\x1c\x1f",
    "tail   ",
    "   lead",
    # contractions, cases
    "don't I'LL 'tis ''s 'S'd we\u2019re o'\u017f",
    "\u01c5\u0130\u0131\u00df\u1e9e\ufb03 McDONALD iPhone HTTPServer",
    # numbers
    "0123456789" * 4,
    "1,234.56e-7 \u0661\u0662\u0663 \u0967\u0968 \u00b2\u00bd\u2167\u2461",
    # scripts, emoji
    "\u0e01\u0e33\u0e19\u0e35\u0e49\u0e44\u0e21\u0e48\u0e40\u0e27\u0e49\u0e19",
    "\u0915\u094d\u0937\u093f \u0928\u093c\u0929",
    "\u6f22\u5b57\u3068\u304b\u306a\u4ea4\u3058\u308a\u3001\ud55c\uae00\u3002",
    "\u05e9\u05c1\u05dc\u05d5\u05dd \u0627\u0644\u0633\u0651\u0644\u0627\u0645",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f3fd \U0001f1eb\U0001f1f7 #\ufe0f\u20e3",
    # long words
    "a" * 300,
    "ab" * 150,
    " " * 300,
    "\n" * 300,
    "-" * 300,
    "\u4e2d" * 100,
    "QUJD+/Rr09ab==" * 20,
    # end-of-text as text, whole and in parts
    "<|endoftext|>",
    "see <|endoftext|>, <|endoftext",
    "|endoftext|> <|endoftext|><|endoftext|>",
)
