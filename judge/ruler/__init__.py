"""RULER: a language model ranks the attempts of a group, so that apps without a reward learn too."""
