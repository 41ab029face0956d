"""transformers copies modeling files to a temporary folder of this session, not to the user's cache."""

import os
import tempfile

os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="boost-test-hf-")
