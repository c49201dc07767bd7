"""The registered operators' library."""

import torch

LIBRARY = torch.library.Library("tileweave", "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag,)
