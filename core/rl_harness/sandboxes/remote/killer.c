/* Kills processes of a machine whose own programs may be an agent's by now. It needs nothing of the machine but its
 * kernel and /proc: no loader, no library, no shell. "python tools/killer.py" makes killer.x86_64 of it.
 *
 *   killer list               every process but itself, "PID:START" each, so that one can be told from a later one
 *   killer all PID:START...   kills every process but the first one, those spared, itself and what started it
 *   killer marked VARIABLE    kills every process with this NAME=VALUE in the environment that it was started with
 *
 * Kernel threads and zombies are no processes here. It says DONE once a whole look finds none to kill. */

#define DONE "every process was killed\n"
#define LOOKS 5000
#define QUICK_LOOKS 50
#define KERNEL_THREAD 0x200000
#define SIGKILL 9
#define DEEP 64

typedef long word;

__attribute__((used)) static const char source[] = "source:" SOURCE;

static word call(word number, word a, word b, word c) {
    word result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return result;
}
static word read_(int file, void *to, word size) { return call(0, file, (word)to, size); }
static void write_(int file, const char *text, word size) {
    while (size > 0) {
        word done = call(1, file, (word)text, size);
        if (done <= 0) return;
        text += done, size -= done;
    }
}
static int open_(const char *path) { return (int)call(2, (word)path, 02000000 /* close-on-exec */, 0); }
static void close_(int file) { call(3, file, 0, 0); }
static void nap(void) { word spec[2] = {0, 1000000}; call(35, (word)spec, 0, 0); }
static word own(void) { return call(39, 0, 0, 0); }
static word parent(void) { return call(110, 0, 0, 0); }
static word kill_(word pid) { return call(62, pid, SIGKILL, 0); }
static word entries(int folder, void *to, word size) { return call(217, folder, (word)to, size); }
static void leave(int code) { for (;;) call(231, code, 0, 0); }

static word length(const char *text) { word n = 0; while (text[n]) n++; return n; }
static int same(const char *a, const char *b) { while (*a && *a == *b) a++, b++; return *a == *b; }

static char *number(char *to, unsigned long value) {
    char digits[24];
    int n = 0;
    do digits[n++] = (char)('0' + value % 10); while (value /= 10);
    while (n) *to++ = digits[--n];
    *to = 0;
    return to;
}
static unsigned long parse(const char **at) {
    unsigned long value = 0;
    while (**at >= '0' && **at <= '9') value = 10 * value + (unsigned long)(*(*at)++ - '0');
    return value;
}

struct process { word pid, parent; unsigned long flags, start; char state; };

static char path[64];
static const char *file_of(word pid, const char *name) {
    char *at = path;
    for (const char *from = "/proc/"; *from;) *at++ = *from++;
    at = number(at, (unsigned long)pid);
    *at++ = '/';
    while ((*at++ = *name++)) {}
    return path;
}

/* Whether there is such a process: its state, its parent, its flags and its start are fields 3, 4, 9 and 22. */
static int look(word pid, struct process *found) {
    char text[1024];
    int file = open_(file_of(pid, "stat"));
    if (file < 0) return 0;
    word size = read_(file, text, sizeof text - 1);
    close_(file);
    if (size <= 0) return 0;
    text[size] = 0;
    const char *at = text + size;
    while (at > text && *at != ')') at--;  /* a name may have anything in it, so that the last one counts */
    if (*at != ')' || !at[1]) return 0;
    at += 2;
    found->pid = pid;
    found->state = *at;
    for (int field = 3; *at; field++) {
        const char *value = at;
        if (field == 4) found->parent = (word)parse(&value);
        if (field == 9) found->flags = parse(&value);
        if (field == 22) { found->start = parse(&value); return 1; }
        while (*at && *at != ' ') at++;
        while (*at == ' ') at++;
    }
    return 0;
}
static int lives(const struct process *one) {
    return one->state != 'Z' && one->state != 'X' && !(one->flags & KERNEL_THREAD);
}
static char *name_of(const struct process *one, char *to) {
    char *at = number(to, (unsigned long)one->pid);
    *at++ = ':';
    return number(at, one->start);
}

static int has_variable(word pid, const char *variable) {
    static char text[65536];
    word wanted = length(variable), matched = 0, size;
    int begins = 1, file = open_(file_of(pid, "environ"));
    if (file < 0) return 0;
    while ((size = read_(file, text, sizeof text)) > 0)
        for (word i = 0; i < size; i++) {
            if (!text[i]) {
                if (begins && matched == wanted) { close_(file); return 1; }
                begins = 1, matched = 0;
            } else if (begins) {
                if (matched < wanted && text[i] == variable[matched]) matched++;
                else begins = 0;
            }
        }
    close_(file);
    return begins && matched && matched == wanted;
}

static word ancestors[DEEP];
static int deep;
static int is_ours(word pid) {
    if (pid == own()) return 1;
    for (int i = 0; i < deep; i++) if (ancestors[i] == pid) return 1;
    return 0;
}

enum task { LIST, ALL, MARKED };

static int wanted(enum task task, const struct process *one, char **arguments) {
    char name[64];
    if (!lives(one) || one->pid == own()) return 0;
    if (task == LIST) return 1;
    if (task == MARKED) return has_variable(one->pid, arguments[0]);
    if (one->pid == 1 || is_ours(one->pid)) return 0;
    name_of(one, name);
    for (; *arguments; arguments++) if (same(*arguments, name)) return 0;
    return 1;
}

/* One look at every process; how many were met that are wanted, or -1 without /proc. */
static word pass(enum task task, char **arguments) {
    static char buffer[32768];
    char name[64];
    struct process one;
    word size, met = 0;
    int folder = open_("/proc");
    if (folder < 0) return -1;
    while ((size = entries(folder, buffer, sizeof buffer)) > 0)
        for (word at = 0; at < size; at += *(unsigned short *)(buffer + at + 16)) {
            const char *text = buffer + at + 19;
            word pid = (word)parse(&text);
            if (*text || !pid || !look(pid, &one) || !wanted(task, &one, arguments)) continue;
            met++;
            if (task == LIST) {
                char *end = name_of(&one, name);
                *end++ = '\n';
                write_(1, name, end - name);
            } else kill_(pid);
        }
    close_(folder);
    return size < 0 ? -1 : met;
}

__attribute__((used)) static void work(word *stack) {
    char **arguments = (char **)(stack + 1);
    enum task task = LIST;
    struct process one;
    if (stack[0] < 2) leave(2);
    if (same(arguments[1], "all")) task = ALL;
    else if (same(arguments[1], "marked") && stack[0] == 3) task = MARKED;
    else if (!same(arguments[1], "list")) leave(2);
    for (word pid = parent(); pid > 1 && deep < DEEP; pid = one.parent) {
        ancestors[deep++] = pid;
        if (!look(pid, &one)) break;
    }
    for (int n = 0; n < LOOKS; n++) {
        word met = pass(task, arguments + 2);
        if (met < 0) leave(3);
        if (!met || task == LIST) {
            if (task != LIST) write_(1, DONE, sizeof DONE - 1);
            leave(0);
        }
        if (n > QUICK_LOOKS) nap();
    }
    leave(1);
}

__attribute__((naked, used)) void _start(void) { __asm__("mov %rsp, %rdi; and $-16, %rsp; call work"); }
