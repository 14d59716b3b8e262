"""Hot kernels as C.

Layout: `plan` cuts a kernel into blocks that C runs and blocks of the interpreter, and finds which
registers live between them; `values`, `arithmetic`, `floating`, `conversions`, `video` and `memory`
write one instruction each; `text` puts the C file together around the headers in `c`; `build`
compiles it and keeps it in a folder; `machine` keeps the registers of a chunk and makes the calls
(see `run`).

One function runs a lane at a time through all compiled blocks, branches and loops included, with
its registers in C's locals, up to a block of the interpreter, a store or a barrier. All lanes do
one store before any goes on, so memory is read and written in the order in which lanes in step do
it. A group that stays together goes on in C, past barriers too.

Whatever is not plain goes to the interpreter, which then is the only one who reports faults: a lane
with an address that is unmapped, misaligned or out of range, or with a transcendental whose float32
rounding the last bits of float64 decide, stops before its first change, and the interpreter runs it
and those behind it from the same block.

Under the sanitizer the text is another: `watch` and watch.h keep the records of accesses as the
interpreter does, and stop in the same way before any access that is not surely right.
"""
