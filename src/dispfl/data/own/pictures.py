"""One picture file, as every part of the package sees it: upright, grey or coloured, without transparency."""

from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError


class UnreadableError(Exception):
    """Why a picture cannot be read, in a few words; and what can be done about it, where something can."""

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.fix = fix


def read_upright(path: Path, mode: str) -> Image.Image:
    """The picture in mode `L` or `RGB`, turned as its camera says, on black where it is transparent."""
    try:
        with Image.open(path) as file:
            file.load()
            upright = ImageOps.exif_transpose(file)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise UnreadableError("too large", "make it smaller first") from None
    except UnidentifiedImageError:
        raise UnreadableError("not a picture", "PNG and JPEG are") from None
    except Exception as problem:  # a damaged picture can fail in any way there is
        raise UnreadableError(str(problem) or type(problem).__name__) from None
    if upright.mode.startswith(("I", "F")):
        raise UnreadableError("more than 8 bits a channel", "save it with 8")
    if "A" in upright.getbands() or "transparency" in upright.info:  # what cannot be seen is black, as beyond an edge
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "black"), upright.convert("RGBA"))
    return upright.convert(mode)


def stretched(picture: Image.Image, width: int, height: int) -> Image.Image:
    """The picture at this size, its proportions given up."""
    if picture.size == (width, height):
        return picture
    return picture.resize((width, height), Image.Resampling.BILINEAR)
