"""A small C library in the place of CUDA's driver: two devices of host memory.

It is stricter than the real one. What is begun on a stream runs when somebody waits for it and not
before, so that a slot that is filled too early, or memory that is read too early, has wrong bytes.
Every call needs the context whose memory, stream or event it is given, and copies must lie within
memory that was allocated there and be from memory that is page-locked meanwhile. A context, stream,
event, module or memory that was destroyed may not be used again. What is wrong ends the process,
also at its exit, with the stacks of its threads (`run`). It computes nothing by itself: modules are
refused, but for the casts of `Kernels`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import forked
import needs
import numpy as np
from ptx_machine import Machine

from streamload.codecs.cast_cuda import cast_ptx
from streamload.codecs.cast_reference import cast_bytes
from streamload.core.dtypes import DType

SOURCE = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 101, BAD_IMAGE = 218, NO_CONTEXT = 201,
       NOT_READY = 600, FAILED = 719 };
enum { DEVICE, HOST };  /* kinds of memory */
enum { CONTEXT = 1, STREAM, EVENT, MODULE };  /* kinds of handles; a function is its module */

typedef struct Work {  /* a copy, or the launch of a kernel */
    struct Work *next; uint64_t at; char *to; const char *from; size_t n;
    struct Handle *kernel; uint64_t arguments[4];
} Work;
typedef struct Handle {  /* none is ever freed, so that the use of a destroyed one is seen */
    int kind, gone; struct Handle *context;
    int device;                              /* of a context */
    struct Handle *next; Work *work; int busy;  /* of a stream */
    struct Handle *stream; uint64_t at;      /* of an event */
    void *kernel;                            /* of a module */
} Handle;
typedef struct Memory { struct Memory *next; char *first; size_t n; int kind; Handle *context; }
    Memory;

/* what tests look at and set */
int streams, events, registered, host_allocated, contexts_made, null_waits, copies_run, launches;
void *(*load)(const char *image);  /* a kernel for what is in an image, 0 for none */
void (*launch)(void *kernel, uint64_t, uint64_t, uint64_t, uint64_t);
/* on the null stream, with a buffer of all arguments, as tinygrad launches */
void (*launch_now)(void *kernel, uint64_t blocks, uint64_t threads, void *arguments, uint64_t n);
int null_busy;              /* the null stream has work until somebody waits for it */
int copies_left = -1;       /* copies on streams that succeed; -1 for all */
int locks_left = -1;        /* page locks that succeed; -1 for all */
size_t memory_nbytes = (size_t)1 << 30, used_nbytes[2];
size_t lost_nbytes;         /* said to be free, and not to be had */
int integrated;             /* the devices have no memory of their own */
size_t memfree_nbytes;      /* free, as said where integrated */
char *pool;                 /* the devices' memory, if another process pays for it; never freed */
size_t pool_used;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t idle = PTHREAD_COND_INITIALIZER;
enum { MOST = 1 << 20 };
static Handle *handles;
static int made;
static Handle *primary[2], *all_streams;
static Memory *memories;
static uint64_t now;
static __thread Handle *stack[64];
static __thread int depth;

static void wrong(const char *call, const char *what) {
    fprintf(stderr, "the stand-in of CUDA's driver: %s: %s\n", call, what);
    abort();
}
static Handle *current(void) { return depth ? stack[depth - 1] : 0; }

static Handle *make(int kind, Handle *context) {
    int at = __atomic_fetch_add(&made, 1, __ATOMIC_SEQ_CST);
    if (at >= MOST) abort();
    handles[at].kind = kind;
    handles[at].context = context;
    return handles + at;
}
static void need(const Handle *handle, int kind, const char *call) {
    const char *names[] = {"", "a context", "a stream", "an event", "a module"};
    char what[64];
    if (handle >= handles && handle < handles + MOST && handle->kind == kind
        && !handle->gone && !(handle->context && handle->context->gone)) return;
    snprintf(what, sizeof what, "%s that was destroyed, or never was", names[kind]);
    wrong(call, what);
}
static Handle *in(const char *call) {
    if (!depth) wrong(call, "no context is current");
    need(current(), CONTEXT, call);
    return current();
}
__attribute__((constructor)) static void begin_all(void) {
    handles = mmap(0, MOST * sizeof *handles, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (int device = 0; device < 2; device++) {
        primary[device] = make(CONTEXT, 0);
        primary[device]->device = device;
    }
}

static Memory *memory_at(const void *first, size_t n, int kind) {
    for (Memory *m = memories; m; m = m->next)
        if (m->kind == kind && (char *)first >= m->first && (char *)first + n <= m->first + m->n)
            return m;
    return 0;
}
static void need_memory(const void *first, size_t n, int kind, const char *call) {
    pthread_mutex_lock(&mutex);
    if (n && !memory_at(first, n, kind)) wrong(call, "memory that is freed, or no device's");
    pthread_mutex_unlock(&mutex);
}
static void add_memory(void *first, size_t n, int kind) {
    Memory *m = malloc(sizeof *m);
    *m = (Memory){memories, first, n, kind, current()};
    memories = m;
}
static size_t remove_memory(void *first, int kind, const char *call) {
    for (Memory **m = &memories; *m; m = &(*m)->next)
        if ((*m)->first == first && (*m)->kind == kind) {
            Memory *gone = *m;
            size_t n = gone->n;
            if (kind == DEVICE && gone->context != current())
                wrong(call, "memory of another context");
            for (Handle *s = all_streams; s; s = s->next)
                for (Work *work = s->work; work; work = work->next) {
                    const char *end = kind == DEVICE ? work->to : work->from;
                    if (end >= gone->first && end < gone->first + n)
                        wrong(call, "a copy of this memory has not ended");
                }
            *m = gone->next; free(gone);
            return n;
        }
    wrong(call, "memory that was freed, or never allocated");
    return 0;
}

/* run what was begun on a stream up to a moment; the mutex is held, but not while a kernel runs */
static void run(Handle *stream, uint64_t until) {
    while (stream->work && stream->work->at <= until) {
        if (stream->busy) { pthread_cond_wait(&idle, &mutex); continue; }
        Work *work = stream->work;
        if (work->kernel) {
            uint64_t *a = work->arguments;
            need(work->kernel, MODULE, "a kernel");
            for (int i = 0; i < 2; i++)
                if (!memory_at((void *)a[i], 1, DEVICE)) wrong("a kernel", "memory that is freed");
            stream->busy = 1;
            pthread_mutex_unlock(&mutex);
            launch(work->kernel->kernel, a[0], a[1], a[2], a[3]);
            pthread_mutex_lock(&mutex);
            stream->busy = 0;
            launches++;
            pthread_cond_broadcast(&idle);
        } else {
            if (!memory_at(work->from, work->n, HOST)) wrong("a copy", "memory that is unlocked");
            if (!memory_at(work->to, work->n, DEVICE)) wrong("a copy", "memory that is freed");
            memcpy(work->to, work->from, work->n);
            copies_run++;
        }
        stream->work = work->next;
        free(work);
    }
}
static void begin(Handle *stream, Work work) {
    Work *made = malloc(sizeof work), **last = &stream->work;
    *made = work;
    made->at = ++now;
    while (*last) last = &(*last)->next;
    *last = made;
}

int cuInit(unsigned flags) { return 0; }
int cuGetErrorString(int status, const char **text) {
    *text = status == NO_MEMORY ? "out of memory" : "the stand-in refuses";
    return 0;
}
int cuDeviceGet(int *device, int index) {
    if (index > 1) return NO_DEVICE;
    *device = index;
    return 0;
}
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGetName(char *name, int n, int device) {
    snprintf(name, n, "stand-in %d", device); return 0;
}
int cuDeviceComputeCapability(int *major, int *minor, int device) {
    *major = 9; *minor = 0; return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute != 18 && attribute != 113) wrong("cuDeviceGetAttribute", "one that is not known");
    *value = attribute == 18 ? integrated : 1;
    return 0;
}
int cuDeviceCanAccessPeer(int *can, int device, int other) { *can = 0; return 0; }
int cuDevicePrimaryCtxRetain(Handle **context, int device) { *context = primary[device]; return 0; }

int cuCtxCreate_v2(Handle **context, unsigned flags, int device) {
    Handle *made = make(CONTEXT, 0);
    made->device = device;
    contexts_made++;
    *context = stack[depth++] = made;
    return 0;
}
int cuCtxDestroy_v2(Handle *context) {
    need(context, CONTEXT, "cuCtxDestroy");
    context->gone = 1;
    return 0;
}
int cuCtxSetCurrent(Handle *context) {
    if (context) need(context, CONTEXT, "cuCtxSetCurrent");
    if (!depth) depth = 1;
    stack[depth - 1] = context;
    if (!context) depth--;
    return 0;
}
int cuCtxGetCurrent(void **context) { *context = current(); return 0; }
int cuCtxGetDevice(int *device) { *device = in("cuCtxGetDevice")->device; return 0; }
int cuCtxPushCurrent_v2(Handle *context) {
    need(context, CONTEXT, "cuCtxPushCurrent");
    stack[depth++] = context;
    return 0;
}
int cuCtxPopCurrent_v2(void **context) {
    if (!depth) wrong("cuCtxPopCurrent", "no context is current");
    *context = stack[--depth];
    return 0;
}
int cuCtxSynchronize(void) {
    Handle *context = in("cuCtxSynchronize");
    pthread_mutex_lock(&mutex);
    for (Handle *s = all_streams; s; s = s->next)
        if (s->context == context) run(s, now);
    null_waits += null_busy; null_busy = 0;
    pthread_mutex_unlock(&mutex);
    return 0;
}

int cuMemGetInfo_v2(size_t *free_nbytes, size_t *total) {
    int device = in("cuMemGetInfo")->device;
    *total = memory_nbytes;
    *free_nbytes = integrated ? memfree_nbytes : memory_nbytes - used_nbytes[device];
    return 0;
}
int cuMemAlloc_v2(uint64_t *address, size_t n) {
    int device = in("cuMemAlloc")->device;
    pthread_mutex_lock(&mutex);
    int status = NO_MEMORY;
    if (used_nbytes[device] + n <= memory_nbytes - lost_nbytes) {
        void *made = pool ? pool + pool_used : mmap(0, n, PROT_READ | PROT_WRITE,
                                                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        pool_used += (n + 255) / 256 * 256;
        memset(made, 0xA5, n);
        add_memory(made, n, DEVICE);
        used_nbytes[device] += n;
        *address = (uint64_t)made;
        status = 0;
    }
    pthread_mutex_unlock(&mutex);
    return status;
}
int cuMemFree_v2(uint64_t address) {
    int device = in("cuMemFree")->device;
    pthread_mutex_lock(&mutex);
    size_t n = remove_memory((void *)address, DEVICE, "cuMemFree");
    used_nbytes[device] -= n;
    if (!pool)  /* its addresses are never used again */
        mmap((void *)address, n, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    pthread_mutex_unlock(&mutex);
    return 0;
}
int cuMemHostAlloc(void **made, size_t n, unsigned flags) {
    in("cuMemHostAlloc");
    pthread_mutex_lock(&mutex);
    *made = malloc(n);
    add_memory(*made, n, HOST);
    host_allocated++;
    pthread_mutex_unlock(&mutex);
    return 0;
}
int cuMemFreeHost(void *made) {
    in("cuMemFreeHost");
    pthread_mutex_lock(&mutex);
    remove_memory(made, HOST, "cuMemFreeHost");
    host_allocated--;
    free(made);
    pthread_mutex_unlock(&mutex);
    return 0;
}
int cuMemHostRegister_v2(void *first, size_t n, unsigned flags) {
    in("cuMemHostRegister");
    pthread_mutex_lock(&mutex);
    for (Memory *m = memories; m; m = m->next)
        if (m->kind == HOST && (char *)first < m->first + m->n && (char *)first + n > m->first)
            wrong("cuMemHostRegister", "memory that is locked");
    int status = locks_left ? 0 : INVALID;
    if (!status) { add_memory(first, n, HOST); registered++; locks_left -= locks_left > 0; }
    pthread_mutex_unlock(&mutex);
    return status;
}
int cuMemHostUnregister(void *first) {
    in("cuMemHostUnregister");
    pthread_mutex_lock(&mutex);
    remove_memory(first, HOST, "cuMemHostUnregister");
    registered--;
    pthread_mutex_unlock(&mutex);
    return 0;
}
int cuMemHostGetDevicePointer_v2(uint64_t *address, void *host, unsigned flags) {
    *address = (uint64_t)host;
    return 0;
}

int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t n, Handle *stream) {
    Handle *context = in("a copy");
    int status = 0;
    pthread_mutex_lock(&mutex);
    Memory *to = memory_at((void *)target, n, DEVICE);
    if (!to || to->context != context) wrong("a copy", "to memory that is not this context's");
    if (!memory_at(source, n, HOST)) wrong("a copy", "from memory that is not locked");
    if (stream) need(stream, STREAM, "a copy");
    if (!stream)
        memcpy((void *)target, source, n);
    else if (stream->context != context)
        wrong("a copy", "a stream of another context");
    else if (copies_left == 0)
        status = FAILED;
    else {
        begin(stream, (Work){.to = (char *)target, .from = source, .n = n});
        copies_left -= copies_left > 0;
    }
    pthread_mutex_unlock(&mutex);
    return status;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t n) {
    in("cuMemcpyDtoH");
    need_memory((void *)from, n, DEVICE, "cuMemcpyDtoH");
    memcpy(to, (void *)from, n);  /* without waiting for streams that do not wait for this one */
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, Handle *stream) {
    if (stream) need(stream, STREAM, "cuMemcpyDtoHAsync");
    return cuMemcpyDtoH_v2(to, from, n);
}
int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t n) {
    in("cuMemcpyDtoD");
    need_memory((void *)from, n, DEVICE, "cuMemcpyDtoD");
    need_memory((void *)to, n, DEVICE, "cuMemcpyDtoD");
    memcpy((void *)to, (void *)from, n);
    return 0;
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t n, Handle *stream) {
    in("cuMemsetD8Async");
    if (stream) need(stream, STREAM, "cuMemsetD8Async");
    need_memory((void *)to, n, DEVICE, "cuMemsetD8Async");
    memset((void *)to, value, n);
    return 0;
}

int cuStreamCreate(void **made, unsigned flags) {
    Handle *stream = make(STREAM, in("cuStreamCreate"));
    pthread_mutex_lock(&mutex);
    stream->next = all_streams;
    *made = all_streams = stream;
    streams++;
    pthread_mutex_unlock(&mutex);
    return 0;
}
int cuStreamQuery(Handle *stream) {
    if (stream) { need(stream, STREAM, "cuStreamQuery"); return stream->work ? NOT_READY : 0; }
    in("cuStreamQuery");
    return null_busy ? NOT_READY : 0;
}
int cuStreamGetCtx(Handle *stream, void **context) {
    if (stream) need(stream, STREAM, "cuStreamGetCtx");
    *context = stream ? stream->context : current();
    return *context ? 0 : NO_CONTEXT;
}
int cuStreamSynchronize(Handle *stream) {
    if (stream) need(stream, STREAM, "cuStreamSynchronize");
    pthread_mutex_lock(&mutex);
    if (stream) run(stream, now);
    else { null_waits += null_busy; null_busy = 0; }
    pthread_mutex_unlock(&mutex);
    return 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) { return *mode == 1 ? 0 : INVALID; }
int cuStreamWaitEvent(Handle *stream, Handle *event, unsigned flags) {
    in("cuStreamWaitEvent");
    if (stream) need(stream, STREAM, "cuStreamWaitEvent");
    need(event, EVENT, "cuStreamWaitEvent");
    pthread_mutex_lock(&mutex);  /* what waits is the host, or begins at once */
    if (event->stream) run(event->stream, event->at);
    pthread_mutex_unlock(&mutex);
    return 0;
}
int cuStreamDestroy_v2(Handle *stream) {
    need(stream, STREAM, "cuStreamDestroy");
    pthread_mutex_lock(&mutex);
    if (stream->work) wrong("cuStreamDestroy", "its copies have not ended");
    for (Handle **s = &all_streams; *s; s = &(*s)->next)
        if (*s == stream) { *s = stream->next; break; }
    stream->gone = 1;
    streams--;
    pthread_mutex_unlock(&mutex);
    return 0;
}
int cuEventCreate(void **made, unsigned flags) {
    *made = make(EVENT, in("cuEventCreate"));
    __atomic_add_fetch(&events, 1, __ATOMIC_SEQ_CST);
    return 0;
}
int cuEventDestroy_v2(Handle *event) {
    need(event, EVENT, "cuEventDestroy");
    event->gone = 1;
    __atomic_sub_fetch(&events, 1, __ATOMIC_SEQ_CST);
    return 0;
}
int cuEventRecord(Handle *event, Handle *stream) {
    Handle *context = in("cuEventRecord");
    need(event, EVENT, "cuEventRecord");
    need(stream, STREAM, "cuEventRecord");
    if (event->context != context || stream->context != context)
        wrong("cuEventRecord", "an event or a stream of another context");
    pthread_mutex_lock(&mutex);
    event->stream = stream;
    event->at = now;
    pthread_mutex_unlock(&mutex);
    return 0;
}
int cuEventQuery(Handle *event) {
    need(event, EVENT, "cuEventQuery");
    pthread_mutex_lock(&mutex);
    Work *first = event->stream ? event->stream->work : 0;
    int status = first && first->at <= event->at ? NOT_READY : 0;
    pthread_mutex_unlock(&mutex);
    return status;
}
int cuEventSynchronize(Handle *event) {
    need(event, EVENT, "cuEventSynchronize");
    pthread_mutex_lock(&mutex);
    if (event->stream) run(event->stream, event->at);
    pthread_mutex_unlock(&mutex);
    return 0;
}

int cuModuleLoadData(Handle **module, const void *image) {
    Handle *context = in("cuModuleLoadData");
    void *kernel = load ? load(image) : 0;
    if (!kernel) return BAD_IMAGE;
    *module = make(MODULE, context);
    (*module)->kernel = kernel;
    return 0;
}
int cuModuleLoadDataEx(Handle **module, const void *image, unsigned n, int *options,
                       void **values) {
    return cuModuleLoadData(module, image);
}
int cuModuleGetFunction(Handle **function, Handle *module, const char *name) {
    need(module, MODULE, "cuModuleGetFunction");
    *function = module;
    return 0;
}
int cuModuleUnload(Handle *module) {
    need(module, MODULE, "cuModuleUnload");
    module->gone = 1;
    return 0;
}
int cuLaunchKernel(Handle *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                   unsigned by, unsigned bz, unsigned shared, Handle *stream, void **arguments,
                   void **extra) {
    Handle *context = in("cuLaunchKernel");
    need(function, MODULE, "cuLaunchKernel");
    if (function->context != context) wrong("cuLaunchKernel", "a module of another context");
    if (extra && launch_now) {
        launch_now(function->kernel, (uint64_t)gx * gy * gz, bx * by * bz, extra[1],
                   *(size_t *)extra[3]);
        return 0;
    }
    need(stream, STREAM, "cuLaunchKernel");
    if (stream->context != context) wrong("cuLaunchKernel", "a stream of another context");
    Work work = {.kernel = function};
    for (int i = 0; i < 4; i++) work.arguments[i] = *(uint64_t *)arguments[i];
    pthread_mutex_lock(&mutex);
    begin(stream, work);
    pthread_mutex_unlock(&mutex);
    return 0;
}
"""


def build(folder: Path, name: str = "libcuda.so.1") -> Path:
    """Compile the stand-in to a library that calls itself ``name``; skips without a C compiler."""
    compiler = shutil.which("clang") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        needs.lacking("no C compiler, or no Linux")
    source = folder / "stand_in.c"
    source.write_text(SOURCE)
    command = [compiler, "-O1", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{name}"]
    subprocess.run([*command, "-o", name, source.name], cwd=folder, check=True)
    return folder / name


class Kernels:
    """The casts, for the stand-in to launch in the process that loaded it: by the reference.

    Kept as long as it is used. Whether the PTX computes the same is tested elsewhere.
    """

    def __init__(self, driver: Any, pairs: Iterable[tuple[DType, DType]]) -> None:
        """Give the stand-in ``driver``, by ``ctypes.CDLL``, casts of pairs of source and target."""
        self._casts = [(src, dst, clamp) for src, dst in pairs for clamp in (False, True)]
        self._texts = [cast_ptx(s, d, clamp=clamp).encode() for s, d, clamp in self._casts]
        word = ctypes.c_uint64
        self._hooks = {
            "load": ctypes.CFUNCTYPE(word, ctypes.c_char_p)(self._load),
            "launch": ctypes.CFUNCTYPE(None, word, word, word, word, word)(self._launch),
        }
        for name, hook in self._hooks.items():
            ctypes.c_void_p.in_dll(driver, name).value = ctypes.cast(hook, ctypes.c_void_p).value

    def _load(self, image: bytes) -> int:
        return self._texts.index(image) + 1 if image in self._texts else 0

    def _launch(self, kernel: int, source: int, out: int, numel: int, tally: int) -> None:
        src, dst, clamp = self._casts[kernel - 1]
        data = ctypes.string_at(source, src.nbytes(numel))
        cast = bytearray(dst.nbytes(numel))
        counts = cast_bytes(src, dst, memoryview(data), memoryview(cast), clamp=clamp)
        ctypes.memmove(out, bytes(cast), len(cast))
        told = (ctypes.c_uint64 * 3).from_address(tally)
        for i, more in enumerate((counts[0], counts[1], sum(counts))):
            told[i] += more


class Machines:
    """Kernels of PTX on the null stream, run by `ptx_machine`; kept as long as it is used.

    What a machine refuses ends the process: ctypes would pass over the error.
    """

    def __init__(self, driver: Any, nbytes: int = 2**22) -> None:
        """Give the stand-in ``driver``, by ``ctypes.CDLL``, memory and a way to run kernels."""
        self.launches = 0
        self._texts: list[str] = []
        memory = np.zeros(nbytes + 256, np.uint8)
        self._memory = memory[-memory.ctypes.data % 256 :]
        word, place = ctypes.c_uint64, ctypes.c_void_p
        self._hooks = {
            "load": ctypes.CFUNCTYPE(word, ctypes.c_char_p)(self._load),
            "launch_now": ctypes.CFUNCTYPE(None, word, word, word, place, word)(self._launch),
        }
        for name, hook in self._hooks.items():
            place.in_dll(driver, name).value = ctypes.cast(hook, place).value
        place.in_dll(driver, "pool").value = self._memory.ctypes.data

    def _load(self, image: bytes) -> int:
        self._texts.append(image.decode())
        return len(self._texts)

    def _launch(self, kernel: int, blocks: int, threads: int, place: int, nbytes: int) -> None:
        given = np.frombuffer(ctypes.string_at(place, nbytes), np.uint64).tolist()
        try:
            machine = Machine(self._texts[kernel - 1], self._memory, self._memory.ctypes.data)
            machine.launch(blocks, threads, given)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        self.launches += 1


def environment(folder: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("CUDA_PATH", "DEV", "NVRTC_PATH")}
    paths = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    return kept | {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": paths}


def run(folder: Path, code: str, *arguments: object, **variables: str) -> str:
    options = ("-X", "faulthandler")
    return forked.fresh(code, *arguments, options=options, env=environment(folder), **variables)
