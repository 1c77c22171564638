"""ResNet-50 (He et al. 2015, with the stride in the 3x3 layers) as far as K-FAC sees it; see ``transformers.py``."""

from torch import Tensor, nn
from torch.nn import functional as F

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
EXPANSION = 4


class Convolution(nn.Module):
    """Conv2d without bias, then BatchNorm2d."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.reduce, self.middle = Convolution(inputs, width, 1), Convolution(width, width, 3, stride)
        self.expand = Convolution(width, outputs, 1)
        self.shortcut = nn.Identity() if inputs == outputs else Convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.expand(F.relu(self.middle(F.relu(self.reduce(x))))) + self.shortcut(x))


class ResNet50(nn.Module):
    """Images [B, 3, 224, 224] -> logits of 1000 classes; 25.6 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, channels = Convolution(3, 64, 7, 2), 64
        blocks = []
        for index, (width, count) in enumerate(STAGES):
            for position in range(count):
                blocks.append(Bottleneck(channels, width, stride=2 if index and not position else 1))
                channels = EXPANSION * width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1))
        return self.head(x.mean((2, 3)))
