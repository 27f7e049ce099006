/* Tells callgrind which layer of Python code is at work.

   Python's hook for frames (PEP 523) calls one of 128 functions, by the layer that the frame's file belongs to, and
   that function evaluates the frame. valgrind is told to count every other function as part of its caller, so what
   such a function costs "itself" is what its layer costs, with all C code that the layer calls. `callgrind.py` compiles
   this file, names the layers and reads the costs. */

#define Py_BUILD_CORE 1
#include <Python.h>
#include <internal/pycore_frame.h>
#include <internal/pycore_interp.h>
#include <valgrind/callgrind.h>

typedef PyObject *(*evaluate)(PyThreadState *, _PyInterpreterFrame *, int);

static Py_ssize_t extra = -1; /* where a code object remembers its layer, plus one */
static PyObject *layer_of;    /* Python: the layer of a file's name */
static int asking;

/* The empty assembly keeps the compiler from merging functions that do the same. */
#define LAYER(n)                                                                                      \
    __attribute__((noinline)) PyObject *Zlayer_##n(PyThreadState *t, _PyInterpreterFrame *f, int x) { \
        PyObject *value = _PyEval_EvalFrameDefault(t, f, x);                                          \
        __asm__ volatile("" : : "r"(n));                                                              \
        return value;                                                                                 \
    }
#define LAYERS(a) \
    LAYER(a##0) LAYER(a##1) LAYER(a##2) LAYER(a##3) LAYER(a##4) LAYER(a##5) LAYER(a##6) LAYER(a##7)
LAYERS(00) LAYERS(01) LAYERS(02) LAYERS(03) LAYERS(04) LAYERS(05) LAYERS(06) LAYERS(07)
LAYERS(10) LAYERS(11) LAYERS(12) LAYERS(13) LAYERS(14) LAYERS(15) LAYERS(16) LAYERS(17)

#define NAMES(a)                                                                            \
    Zlayer_##a##0, Zlayer_##a##1, Zlayer_##a##2, Zlayer_##a##3, Zlayer_##a##4, Zlayer_##a##5, \
        Zlayer_##a##6, Zlayer_##a##7
static const evaluate layers[128] = {
    NAMES(00), NAMES(01), NAMES(02), NAMES(03), NAMES(04), NAMES(05), NAMES(06), NAMES(07),
    NAMES(10), NAMES(11), NAMES(12), NAMES(13), NAMES(14), NAMES(15), NAMES(16), NAMES(17),
};

static long ask(PyCodeObject *code) {
    PyObject *type, *value, *traceback;
    long number = 0;
    asking = 1;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *found = PyObject_CallOneArg(layer_of, code->co_filename);
    if (found != NULL) {
        number = PyLong_AsLong(found) & 127;
        Py_DECREF(found);
    }
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    asking = 0;
    _PyCode_SetExtra((PyObject *)code, extra, (void *)(number + 1));
    return number;
}

PyObject *Zhook(PyThreadState *thread, _PyInterpreterFrame *frame, int throwing) {
    void *known = NULL;
    _PyCode_GetExtra((PyObject *)frame->f_code, extra, &known);
    long number = known != NULL ? (long)known - 1 : asking ? 0 : ask(frame->f_code);
    return layers[number](thread, frame, throwing);
}

void watch_frames(PyObject *callable) {
    layer_of = Py_NewRef(callable);
    extra = _PyEval_RequestCodeExtraIndex(NULL);
    _PyInterpreterState_SetEvalFrameFunc(PyInterpreterState_Get(), Zhook);
}

void count_from_here(void) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

void count_until_here(void) { CALLGRIND_STOP_INSTRUMENTATION; }
