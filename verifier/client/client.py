"""The client of client.c, by NVIDIA's Python bindings (the package cuda-bindings): the same steps, the same answers, without `entries`.

client.py STEP_MIB STEP...; `version` answers with the version of the bindings.
"""

import json
import os
import signal
import sys

from cuda.bindings import driver

steps = sys.argv[2:]
STEP_MIB = int(sys.argv[1])
NOT_FOUND = 500
STREAM = driver.CUstream(0)
PER_THREAD = driver.CUstream(2)
pools = {}
taken = []
started = False


def say(step, **values):
    print(json.dumps({"step": step, **values}, separators=(",", ":")), flush=True)


def fail(what, code):
    say("failed", what=what, code=int(code))
    sys.exit(1)


def must(name, *arguments):
    code, *values = getattr(driver, name)(*arguments)
    if code:
        fail(name, code)
    return values[0] if len(values) == 1 else values


def start():
    global started
    if started:
        return
    started = True
    must("cuInit", 0)
    device = must("cuDeviceGet", 0)
    must("cuCtxSetCurrent", must("cuDevicePrimaryCtxRetain", device))


def pool(kind, size):
    allocation_type = getattr(driver.CUmemAllocationType, f"CU_MEM_ALLOCATION_TYPE_{kind}", None)
    if allocation_type is None:
        return NOT_FOUND, None
    if kind not in pools:
        properties = driver.CUmemPoolProps()
        properties.allocType = allocation_type
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        code, made = driver.cuMemPoolCreate(properties)
        if code:
            return code, None
        pools[kind] = made
    return driver.cuMemAllocFromPoolAsync(size, pools[kind], STREAM)


def vmm(size):
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    return driver.cuMemCreate(size, properties, 0)


def shape(of, width, height, depth=None):
    of.Width, of.Height, of.NumChannels = width, height, 4
    of.Format = driver.CUarray_format.CU_AD_FORMAT_FLOAT
    if depth is not None:
        of.Depth = depth
    return of


def pitch(mib):
    code, pointer, _ = driver.cuMemAllocPitch(1 << 20, mib, 16)
    return code, pointer


def asynchronous(mib):
    return driver.cuMemAllocAsync(mib << 20, STREAM)


def free(pointer):
    must("cuMemFree", pointer)


def free_async(pointer):
    must("cuMemFreeAsync", pointer, STREAM)


ALLOCATORS = {
    "malloc": (lambda mib: driver.cuMemAlloc(mib << 20), free),
    "pitch": (pitch, free),
    "managed": (
        lambda mib: driver.cuMemAllocManaged(mib << 20, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value),
        free,
    ),
    "async": (asynchronous, free_async),
    # By a handle instead of another function: which function it is the bindings decide at their start.
    "async-per-thread": (
        lambda mib: driver.cuMemAllocAsync(mib << 20, PER_THREAD),
        lambda pointer: must("cuMemFreeAsync", pointer, PER_THREAD),
    ),
    "pool": (lambda mib: pool("PINNED", mib << 20), free_async),
    "managed-pool": (lambda mib: pool("MANAGED", mib << 20), free_async),
    "vmm": (lambda mib: vmm(mib << 20), lambda handle: must("cuMemRelease", handle)),
    "array": (
        lambda mib: driver.cuArrayCreate(shape(driver.CUDA_ARRAY_DESCRIPTOR(), 1024, mib * 64)),
        lambda array: must("cuArrayDestroy", array),
    ),
    "array-3d": (
        lambda mib: driver.cuArray3DCreate(shape(driver.CUDA_ARRAY3D_DESCRIPTOR(), 1024, 64, mib)),
        lambda array: must("cuArrayDestroy", array),
    ),
    "mipmapped-array": (
        lambda mib: driver.cuMipmappedArrayCreate(shape(driver.CUDA_ARRAY3D_DESCRIPTOR(), 1024, mib * 64, 0), 1),
        lambda array: must("cuMipmappedArrayDestroy", array),
    ),
}


def take(argument):
    name, mib = argument.split(":")
    wanted, had, code = int(mib), 0, 0
    allocate, give_back = ALLOCATORS[name]
    start()
    while had < wanted:
        try:
            code, pointer = allocate(STEP_MIB)
        except RuntimeError as error:
            # The bindings' own answer for a function that the driver has not: 'Function "cuX" not found'.
            if "not found" not in str(error):
                raise
            code = NOT_FOUND
        if code:
            break
        taken.append((give_back, pointer))
        had += STEP_MIB
    say("take", allocator=name, mib=had, code=int(code))


def give_back():
    while taken:
        function, pointer = taken.pop()
        function(pointer)
    must("cuStreamSynchronize", STREAM)
    while pools:
        must("cuMemPoolDestroy", pools.popitem()[1])


def info():
    start()
    free_bytes, total = must("cuMemGetInfo")
    say("info", free=free_bytes >> 20, total=total >> 20, device=must("cuDeviceTotalMem", 0) >> 20)


def run_again(rest, clean):
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    os.execve(sys.executable, [sys.executable, __file__, sys.argv[1], *rest], kept if clean else os.environ)


def wait_for(child):
    _, status = os.waitpid(child, 0)
    if status:
        fail("its child", status)
    sys.exit(0)


def spawn(rest, clean):
    child = os.fork()
    if not child:
        run_again(rest, clean)
    wait_for(child)


def fork_and_take(argument):
    reads, writes = os.pipe()
    child = os.fork()
    if child:
        take(argument)
        os.write(writes, b"\0")
        wait_for(child)
    signal.alarm(60)
    os.close(writes)
    if not os.read(reads, 1):
        sys.exit(1)


signal.alarm(60)
for number, step in enumerate(steps):
    verb, _, argument = step.partition(":")
    if verb == "take":
        take(argument)
    elif verb == "fork":
        fork_and_take(argument)
    elif verb == "free":
        give_back()
    elif verb == "info":
        info()
    elif verb in ("exec", "exec-clean"):
        run_again(steps[number + 1 :], verb == "exec-clean")
    elif verb in ("spawn", "spawn-clean"):
        spawn(steps[number + 1 :], verb == "spawn-clean")
    elif verb == "version":
        from importlib.metadata import version

        say("version", bindings=version("cuda-bindings"))
    elif verb == "hold":
        say("hold")
        sys.stdin.buffer.read()
    else:
        fail(f"unknown step {step}", 1)
