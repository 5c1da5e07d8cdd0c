"""Read rows of one tensor from its file, for embeddings that do not stay on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from streamload.checkpoint.open import Checkpoint
from streamload.checkpoint.shards import file_kind, open_shard
from streamload.codecs.cast_table import OutOfRange, make_cast
from streamload.core.dtypes import DType
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError


class RowReader:
    """Reads rows of a tensor and casts them. Between two calls it holds no memory and no file."""

    def __init__(
        self, checkpoint: Checkpoint, info: TensorInfo, dst: DType, out_of_range: OutOfRange
    ) -> None:
        """Read nothing yet; ``info``: a tensor of at least one axis; ``dst``: dtype of results."""
        self.row_shape, self.dst = info.shape[1:], dst
        self._info = info
        self._header = checkpoint.headers[info.shard]
        self._numel = math.prod(self.row_shape)
        self._nbytes = info.dtype.nbytes(self._numel)  # of a row
        self._cast = make_cast(info.dtype, dst, out_of_range=out_of_range)

    def read(self, rows: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Return rows as a flat array of bytes, cast to the reader's `dst`; ``rows``: ascending."""
        count = self._info.shape[0]
        if rows and not 0 <= rows[0] <= rows[-1] < count:
            wrong = next(row for row in rows if not 0 <= row < count)
            raise IndexError(f"{self._info.name} has {count} rows, and not row {wrong}")
        data = np.empty(len(rows) * self._nbytes, np.uint8)
        view = memoryview(data.data)
        reader = open_shard(self._header, file_kind(self._info.shard, "pread"))
        try:
            reader.stop_ahead()  # rows are scattered in the file
            breaks = [at for at in range(1, len(rows)) if rows[at] != rows[at - 1] + 1]
            for at, stop in pairwise([0, *breaks, len(rows)] if rows else []):
                start = self._info.start + rows[at] * self._nbytes
                reader.read_into(start, view[at * self._nbytes : stop * self._nbytes])
        except CheckpointError as error:
            raise error.of_tensor(self._info.name) from error
        finally:
            reader.close()
        if self.dst is self._info.dtype:
            return data
        out = np.empty(self.dst.nbytes(len(rows) * self._numel), np.uint8)
        if len(rows):
            self._cast(view, memoryview(out.data))
        return out
