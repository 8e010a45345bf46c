"""Mounts a folder as NFS clients see it: names are cached, and a file is current when it is opened.

Each mount point is one client. It serves names (missing ones too), attributes and listings from its cache for
`CACHE_S`, unless the client itself has changed the folder. It asks the server when a file is opened, created
or locked. NFS guarantees this (close-to-open), with the times of its default mount options (acdirmin=30,
acdirmax=60). The clients are FUSE file systems in separate processes, and only root can mount them.

python -m tests.support.nfs FOLDER DESCRIPTOR
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CACHE_S = 45
FAST_S = CACHE_S / 3
"""Seconds that are too short for a wait until a cache expires."""
ROOT = 1
HEADER = struct.Struct("<IIQQIIIHH")
REPLY = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<6Q10I")
MAX_WRITE = 1 << 17
BUFFER_BYTES = MAX_WRITE + 4096
ATOMIC_TRUNCATE, BIG_WRITES, FLOCK_LOCKS, INIT_EXT = 1 << 3, 1 << 5, 1 << 10, 1 << 30
ALLOW_MMAP = 1 << (36 - 32)
DIRECT_IO, FLOCK_UNLOCK, INVALIDATE_INODE = 1, 2, 2
RETRY_LOCK_S = 0.05


@contextmanager
def nfs_clients(folder: Path, *mount_points: Path) -> Iterator[None]:
    """Mount `folder` at each of the mount points, each as a separate client.

    The mount points need not exist.
    """
    with contextlib.ExitStack() as stack:
        for mount_point in mount_points:
            stack.enter_context(_client(folder, mount_point))
        yield


@contextmanager
def _client(folder: Path, mount_point: Path) -> Iterator[None]:
    with mounted_by(folder, lambda descriptor: mount(descriptor, mount_point)):
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


@contextmanager
def mounted_by(folder: Path, mounts: Callable[[int], None]) -> Iterator[None]:
    """Serve `folder` over a descriptor that `mounts` mounts. Skip the test if that is not possible."""
    try:
        descriptor = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("no /dev/fuse")
    argv = [sys.executable, "-m", "tests.support.nfs", str(folder), str(descriptor)]
    try:
        mounts(descriptor)
        # The server starts after the mount, because the descriptor cannot be read earlier.
        server = subprocess.Popen(
            argv, pass_fds=[descriptor], cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL
        )
    finally:
        os.close(descriptor)
    with server:
        try:
            yield
        finally:
            server.kill()


def mount(descriptor: int, mount_point: Path) -> None:
    """Mount the server of a /dev/fuse descriptor. Skip the test unless root runs it."""
    mount_point.mkdir(parents=True, exist_ok=True)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"nfs", os.fsencode(mount_point), b"fuse", 0, options.encode()):
        pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")


@dataclass
class Node:
    """A file or folder that the kernel knows, like a file handle of NFS."""

    descriptor: int
    listing: list[tuple[str, int, int]] | None = None
    """The (name, inode number, type) of each entry, or None if the listing is not cached."""
    listed_s: float = 0.0
    locks: dict[int, int] = field(default_factory=dict)
    """Maps a lock owner to the descriptor that has the flock."""


class Server:
    """Answers the requests of one client's kernel in sequence."""

    def __init__(self, folder: str, device: int) -> None:
        self.device = device
        self.nodes = {ROOT: Node(os.open(folder, os.O_PATH))}
        self.numbers = {self._identity(self.nodes[ROOT]): ROOT}
        self.next_number = ROOT + 1
        self.files: dict[int, int] = {}
        """Maps a handle to its descriptor, which is the same number."""
        self.waiting: list[tuple[int, int, bytes]] = []
        """Requests (unique, node, argument) for locks that other owners hold."""

    def run(self) -> None:
        """Serve until the file system is unmounted."""
        os.set_blocking(self.device, False)
        import select

        poller = select.poll()
        poller.register(self.device, select.POLLIN)
        while True:
            poller.poll(RETRY_LOCK_S * 1000 if self.waiting else None)
            for request in self.waiting[:]:
                self._retry_lock(request)
            try:
                data = os.read(self.device, BUFFER_BYTES)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EINTR, errno.ENOENT):
                    continue
                return  # ENODEV means that it was unmounted
            self._serve(data)

    def _serve(self, data: bytes) -> None:
        length, opcode, unique, number, _uid, _gid, _pid, _, _ = HEADER.unpack_from(data)
        argument = data[HEADER.size : length]
        if (handler := HANDLERS.get(opcode)) is None:
            self._send(unique, b"", errno.ENOSYS)
            return
        try:
            answer = handler(self, number, argument, unique)
        except OSError as error:
            self._send(unique, b"", error.errno or errno.EIO)
            return
        if answer is not None:
            self._send(unique, answer)

    def _send(self, unique: int, answer: bytes, error: int = 0) -> None:
        with contextlib.suppress(OSError):  # the request was interrupted
            os.write(self.device, REPLY.pack(REPLY.size + len(answer), -error, unique) + answer)

    def _path(self, number: int) -> str:
        return f"/proc/self/fd/{self.nodes[number].descriptor}"

    def _identity(self, node: Node) -> tuple[int, int]:
        found = os.fstat(node.descriptor)
        return found.st_dev, found.st_ino

    def _attributes(self, number: int) -> bytes:
        found = os.fstat(self.nodes[number].descriptor)
        times = [found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns]
        seconds, rest = [t // 10**9 for t in times], [t % 10**9 for t in times]
        owner = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev)
        return ATTRIBUTES.pack(
            found.st_ino, found.st_size, found.st_blocks, *seconds, *rest, *owner, found.st_blksize, 0
        )

    def _changed(self, *numbers: int) -> None:
        """Forget the listings of folders that this client has changed."""
        for number in numbers:
            self.nodes[number].listing = None

    def _entry(self, parent: int, name: bytes) -> bytes:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self.nodes[parent].descriptor)
        node = Node(descriptor)
        known = self.numbers.get(self._identity(node))
        if known is None:
            known, self.next_number = self.next_number, self.next_number + 1
            self.nodes[known] = node
            self.numbers[self._identity(node)] = known
        else:
            os.close(descriptor)
        return struct.pack("<4Q2I", known, 0, CACHE_S, CACHE_S, 0, 0) + self._attributes(known)

    def init(self, number: int, argument: bytes, unique: int) -> bytes:
        flags = ATOMIC_TRUNCATE | BIG_WRITES | FLOCK_LOCKS | INIT_EXT
        head = struct.pack("<IIIIHHII", 7, 38, MAX_WRITE, flags, 12, 9, MAX_WRITE, 1)
        return head + struct.pack("<HHII", MAX_WRITE // 4096, 0, ALLOW_MMAP, 0) + bytes(24)

    def lookup(self, number: int, argument: bytes, unique: int) -> bytes:
        try:
            return self._entry(number, argument.rstrip(b"\0"))
        except FileNotFoundError:
            # A missing name is cached too.
            return struct.pack("<4Q2I", 0, 0, CACHE_S, 0, 0, 0) + bytes(ATTRIBUTES.size)

    def getattr(self, number: int, argument: bytes, unique: int) -> bytes:
        return struct.pack("<QII", CACHE_S, 0, 0) + self._attributes(number)

    def setattr(self, number: int, argument: bytes, unique: int) -> bytes:
        values = struct.unpack_from("<IIQQQQQQIIIIIII", argument)
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid = values
        path = self._path(number)
        if valid & 1:
            Path(path).chmod(mode & 0o7777)
        if valid & 6:
            os.chown(path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            os.truncate(path, size)
        if valid & 0x1B0:
            now_ns, found = time.time_ns(), Path(path).stat()
            times = [found.st_atime_ns, found.st_mtime_ns]
            for index, (given, is_now, value_ns) in enumerate(
                [(16, 128, atime * 10**9 + atime_ns), (32, 256, mtime * 10**9 + mtime_ns)]
            ):
                if valid & (given | is_now):
                    times[index] = now_ns if valid & is_now else value_ns
            os.utime(path, ns=(times[0], times[1]))
        return self.getattr(number, b"", unique)

    def readlink(self, number: int, argument: bytes, unique: int) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=self.nodes[number].descriptor))

    def symlink(self, number: int, argument: bytes, unique: int) -> bytes:
        name, target, _ = argument.split(b"\0")
        os.symlink(target, name, dir_fd=self.nodes[number].descriptor)
        self._changed(number)
        return self._entry(number, name)

    def mkdir(self, number: int, argument: bytes, unique: int) -> bytes:
        mode, umask = struct.unpack_from("<II", argument)
        name = argument[8:].rstrip(b"\0")
        os.mkdir(name, mode & ~umask & 0o7777, dir_fd=self.nodes[number].descriptor)
        self._changed(number)
        return self._entry(number, name)

    def unlink(self, number: int, argument: bytes, unique: int) -> bytes:
        os.unlink(argument.rstrip(b"\0"), dir_fd=self.nodes[number].descriptor)
        self._changed(number)
        return b""

    def rmdir(self, number: int, argument: bytes, unique: int) -> bytes:
        os.rmdir(argument.rstrip(b"\0"), dir_fd=self.nodes[number].descriptor)
        self._changed(number)
        return b""

    def rename(self, number: int, argument: bytes, unique: int) -> bytes:
        (other,) = struct.unpack_from("<Q", argument)
        old, new, _ = argument[8:].split(b"\0")
        parents = {"src_dir_fd": self.nodes[number].descriptor, "dst_dir_fd": self.nodes[other].descriptor}
        os.rename(old, new, **parents)  # noqa: PTH104
        self._changed(number, other)
        return b""

    def link(self, number: int, argument: bytes, unique: int) -> bytes:
        (old,) = struct.unpack_from("<Q", argument)
        name = argument[8:].rstrip(b"\0")
        os.link(self._path(old), name, dst_dir_fd=self.nodes[number].descriptor, follow_symlinks=True)
        self._changed(number)
        return self._entry(number, name)

    def open(self, number: int, argument: bytes, unique: int) -> bytes:
        (flags,) = struct.unpack_from("<I", argument)
        if os.fstat(self.nodes[number].descriptor).st_nlink == 0:
            raise OSError(errno.ESTALE, "replaced or deleted")  # the kernel then looks the name up again
        descriptor = os.open(self._path(number), flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW))
        self._refresh_attributes(number)
        return self._opened(descriptor)

    def _refresh_attributes(self, number: int) -> None:
        notice = struct.pack("<Qqq", number, -1, 0)
        with contextlib.suppress(OSError):  # the kernel has forgotten the inode
            os.write(self.device, REPLY.pack(REPLY.size + len(notice), INVALIDATE_INODE, 0) + notice)

    def _opened(self, descriptor: int) -> bytes:
        self.files[descriptor] = descriptor
        return struct.pack("<QII", descriptor, DIRECT_IO, 0)

    def create(self, number: int, argument: bytes, unique: int) -> bytes:
        flags, mode, umask, _ = struct.unpack_from("<IIII", argument)
        name = argument[16:].rstrip(b"\0")
        parent = self.nodes[number].descriptor
        descriptor = os.open(name, flags | os.O_CREAT, mode & ~umask & 0o7777, dir_fd=parent)
        self._changed(number)
        return self._entry(number, name) + self._opened(descriptor)

    def read(self, number: int, argument: bytes, unique: int) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", argument)
        return os.pread(self.files[handle], size, offset)

    def write(self, number: int, argument: bytes, unique: int) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", argument)
        # A descriptor with O_APPEND writes to the end, whatever the offset is.
        written = os.pwrite(self.files[handle], argument[40 : 40 + size], offset)
        return struct.pack("<II", written, 0)

    def release(self, number: int, argument: bytes, unique: int) -> bytes:
        handle, _, flags, owner = struct.unpack_from("<QIIQ", argument)
        os.close(self.files.pop(handle))
        if flags & FLOCK_UNLOCK:
            self._unlock(number, owner)
        return b""

    def opendir(self, number: int, argument: bytes, unique: int) -> bytes:
        return struct.pack("<QII", 0, 0, 0)

    def readdir(self, number: int, argument: bytes, unique: int) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", argument)
        node = self.nodes[number]
        if node.listing is None or time.monotonic() > node.listed_s + CACHE_S:
            with os.scandir(self._path(number)) as entries:
                found = [(entry.name, entry.inode(), _type_of(entry)) for entry in entries]
            node.listing, node.listed_s = [(".", 1, 4), ("..", 1, 4), *found], time.monotonic()
        answer = b""
        for index in range(offset, len(node.listing)):
            name, inode, kind = node.listing[index]
            raw = os.fsencode(name)
            entry = struct.pack("<QQII", inode, index + 1, len(raw), kind) + raw
            entry += bytes(-len(entry) % 8)
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer

    def statfs(self, number: int, argument: bytes, unique: int) -> bytes:
        found = os.statvfs(self._path(number))
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q4I", *counts, found.f_bsize, found.f_namemax, found.f_frsize, 0) + bytes(24)

    def setlk(self, number: int, argument: bytes, unique: int, waits: bool = False) -> bytes | None:
        _, owner, _, _, kind = struct.unpack_from("<QQQQI", argument)
        if kind == fcntl.F_UNLCK:
            self._unlock(number, owner)
            return b""
        locks = self.nodes[number].locks
        if owner not in locks:
            locks[owner] = os.open(self._path(number), os.O_RDWR)
        exclusive = fcntl.LOCK_EX if kind == fcntl.F_WRLCK else fcntl.LOCK_SH
        try:
            fcntl.flock(locks[owner], exclusive | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(locks.pop(owner))
            if not waits:
                raise
            self.waiting.append((unique, number, argument))
            return None
        return b""

    def setlkw(self, number: int, argument: bytes, unique: int) -> bytes | None:
        return self.setlk(number, argument, unique, waits=True)

    def _retry_lock(self, request: tuple[int, int, bytes]) -> None:
        self.waiting.remove(request)
        unique, number, argument = request
        answer = self.setlk(number, argument, unique, waits=True)
        if answer is not None:
            self._send(unique, answer)

    def _unlock(self, number: int, owner: int) -> None:
        descriptor = self.nodes[number].locks.pop(owner, None)
        if descriptor is not None:
            os.close(descriptor)

    def interrupt(self, number: int, argument: bytes, unique: int) -> None:
        (interrupted,) = struct.unpack_from("<Q", argument)
        for request in self.waiting[:]:
            if request[0] == interrupted:
                self.waiting.remove(request)
                self._send(interrupted, b"", errno.EINTR)


def _type_of(entry: os.DirEntry[str]) -> int:
    if entry.is_symlink():
        return 10
    return 4 if entry.is_dir() else 8


HANDLERS: dict[int, Callable[[Server, int, bytes, int], bytes | None]] = {
    **{1: Server.lookup, 3: Server.getattr, 4: Server.setattr, 5: Server.readlink, 6: Server.symlink},
    **{9: Server.mkdir, 10: Server.unlink, 11: Server.rmdir, 12: Server.rename, 13: Server.link},
    **{14: Server.open, 15: Server.read, 16: Server.write, 17: Server.statfs, 18: Server.release},
    **{26: Server.init, 27: Server.opendir, 28: Server.readdir, 32: Server.setlk, 33: Server.setlkw},
    **{35: Server.create, 36: Server.interrupt},
}
"""Maps an opcode of FUSE to its handler, which returns the answer, or None to answer later.

Other opcodes are answered with ENOSYS, and the kernel works without them. No node is forgotten, so no file
gets the number of another one.
"""


def main(argv: Sequence[str]) -> None:
    Server(argv[0], int(argv[1])).run()


if __name__ == "__main__":
    main(sys.argv[1:])
