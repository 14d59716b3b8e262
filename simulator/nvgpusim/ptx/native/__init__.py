"""PTX as C, the only way to run it.

Layout: `instructions` writes one instruction by the tables of `arithmetic`, `floating`,
`conversions`, `video` and `memory` (what a lane does) or `groups` and `tensor` (what all lanes do
together); `translate` cuts a kernel into blocks and finds which registers live between them;
`c_file` puts the C file together around the headers in `c`; `build` compiles it and keeps it in a
folder; `chunk` keeps the registers of a chunk and makes the calls (see `chunk_run`).

One function runs a lane at a time through all blocks, branches and loops included, with its
registers in C's locals, up to a store, a barrier or what lanes do together. All lanes do one store
before any goes on, so memory is read and written in the order in which lanes in step do it. A group
that stays together goes on in C, past barriers too. C stops at an access that is wrong, and at
lanes that name others than are here with them: `fault_causes` says what is wrong.

Under the sanitizer the text is another: `shadow` and watch.h keep the records of accesses, and tell
Python of those that are not surely right.
"""
