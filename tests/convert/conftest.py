"""Modeling files that transformers copies to run them go to a folder of this session, not to the user's."""

import os
import tempfile

os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="boost-test-hf-")
