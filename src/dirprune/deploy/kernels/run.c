// Programs: lists of steps, run by a pool of threads.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include "steps.h"

static void (*const runs[])(const step_t *, const call_t *, int, int) = {
    place, convolve, pool, adapt, pointwise, relay, take, gather_rows, multiply, combine, scatter_rows};

typedef struct {
  const step_t *steps;
  char *arena;                    // one of `bytes` for each thread
  const float *const *inputs;
  float *const *outputs;
  double *seconds;                // of each step, or NULL
  int64_t bytes, items;           // items: images, or rows
  int32_t count, chunk, vectors;  // rows of a chunk and vectors that hold them; 1 and 0 for images
} job_t;

typedef struct {
  int threads;
  pid_t process;
  pthread_t *thread;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  atomic_int turn, done, stop;
  atomic_llong ticket, open, finished;  // parts of work that were taken, that may be taken, and that are done
  const job_t *job;                     // the rest is written by whoever opens parts, and read by those who took one
  int64_t base, chunk;                  // the first of the open parts; which chunk is shared, -1: each part is a chunk
  int step;
  double began;
} pool_t;
typedef struct { pool_t *pool; int me; } seat_t;

#ifdef CHECKED
static _Thread_local char *lowest, *highest;
static atomic_int outside;
char *checked(const void *p, int64_t size) {
  static char nowhere[VB] __attribute__((aligned(VB)));
  if ((char *)p >= lowest && (char *)p + size <= highest) return (char *)p;
  atomic_fetch_add(&outside, 1);
  return nowhere;
}
#endif

static void relax(int *spins) {  // spin for a moment, then let others run
  if (++*spins < 2000) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  } else sched_yield();
}
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Run the parts [part, end) of step i.
static void step(const job_t *job, int i, const call_t *call, int part, int end) {
#ifdef CHECKED
  lowest = call->arena, highest = call->arena + job->bytes;
#endif
  runs[job->steps[i].kind](&job->steps[i], call, part, end);
  if (job->steps[i].moves) frame(&job->steps[i], call, part, end);
}

// As many chunks as divide among the threads are taken whole, each in the arena of the thread that takes it. The rest
// are shared step by step: a step has a part for each thread, but whoever is free takes the next one, so that a thread
// which the system keeps from running holds up nobody. A part is only taken when it can begin at once.
static int64_t chunks(const job_t *job) { return (job->items + job->chunk - 1) / job->chunk; }
static int64_t whole(const pool_t *pool) { return chunks(pool->job) - chunks(pool->job) % pool->threads; }
static void work(const pool_t *pool, int me, int part) {
  const job_t *job = pool->job;
  const int alone = pool->chunk < 0;
  const int64_t first = (alone ? part : pool->chunk) * job->chunk, left = job->items - first;
  const call_t call = {job->arena + (alone ? me * job->bytes : 0), job->inputs, job->outputs, first,
                       (int32_t)(left < job->chunk ? left : job->chunk), job->vectors};
  if (!alone) step(job, pool->step, &call, part, part + 1);
  else for (int i = 0; i < job->count; i++) {
    const double began = job->seconds && me == 0 ? now() : 0;
    step(job, i, &call, 0, pool->threads);
    if (job->seconds && me == 0) job->seconds[i] += now() - began;
  }
}
static void advance(pool_t *pool) {  // all open parts are done: open the next step's, or end the job
  if (pool->chunk < 0) pool->chunk = whole(pool);
  else {
    if (pool->job->seconds) pool->job->seconds[pool->step] += now() - pool->began;
    if (++pool->step == pool->job->count) pool->step = 0, pool->chunk++;
  }
  pool->began = pool->job->seconds ? now() : 0;
  pool->base = atomic_load(&pool->open);
  if (pool->chunk == chunks(pool->job)) atomic_store(&pool->done, 1);
  else atomic_store(&pool->open, pool->base + pool->threads);
}
static int claim(pool_t *pool, int me) {  // do a part, if one is open
  long long ticket = atomic_load(&pool->ticket);
  if (ticket >= atomic_load(&pool->open) || !atomic_compare_exchange_strong(&pool->ticket, &ticket, ticket + 1)) return 0;
  work(pool, me, (int)(ticket - pool->base));
  if (atomic_fetch_add(&pool->finished, 1) + 1 == atomic_load(&pool->open)) advance(pool);
  return 1;
}
static void *worker(void *seat) {
  pool_t *pool = ((seat_t *)seat)->pool;
  const int me = ((seat_t *)seat)->me;
  free(seat);
  for (int seen = 0;;) {
    for (int spins = 0; atomic_load(&pool->turn) == seen && (!atomic_load(&pool->done) || spins < 4000);)
      if (claim(pool, me)) spins = 0;
      else relax(&spins);
    pthread_mutex_lock(&pool->lock);
    while (atomic_load(&pool->turn) == seen) pthread_cond_wait(&pool->wake, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    if (atomic_load(&pool->stop)) return NULL;
    seen = atomic_load(&pool->turn);
  }
}
static void next_turn(pool_t *pool) {
  pthread_mutex_lock(&pool->lock);
  atomic_fetch_add(&pool->turn, 1);
  pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->lock);
}
static int start(pool_t *pool) {
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->wake, NULL);
  atomic_store(&pool->turn, 0);
  atomic_store(&pool->done, 1);
  atomic_store(&pool->ticket, 0), atomic_store(&pool->open, 0), atomic_store(&pool->finished, 0);
  pool->process = getpid();
  for (int t = 1; t < pool->threads; t++) {
    seat_t *seat = malloc(sizeof *seat);
    if (seat) *seat = (seat_t){pool, t};
    if (!seat || pthread_create(&pool->thread[t], NULL, worker, seat)) {
      free(seat);
      pool->threads = t;
      return -1;
    }
  }
  return 0;
}

void pool_close(pool_t *pool) {
  if (!pool) return;
  if (pool->process == getpid()) {  // threads do not follow into a forked process
    atomic_store(&pool->stop, 1);
    next_turn(pool);
    for (int t = 1; t < pool->threads; t++) pthread_join(pool->thread[t], NULL);
  }
  free(pool->thread);
  free(pool);
}
pool_t *pool_open(int threads) {
  pool_t *pool = calloc(1, sizeof *pool);
  if (!pool) return NULL;
  pool->threads = threads;
  pool->thread = calloc(threads, sizeof *pool->thread);
  if (pool->thread && start(pool) == 0) return pool;
  if (pool->thread) pool_close(pool);
  else free(pool);
  return NULL;
}

// Run a program; returns the number of accesses outside the arena, which only a checked build counts.
int run(pool_t *pool, const job_t *job) {
  if (pool->process != getpid()) start(pool);
  pool->job = job;
  const int64_t alone = whole(pool);
  pool->chunk = alone ? -1 : 0, pool->step = 0, pool->began = job->seconds ? now() : 0;
  pool->base = atomic_load(&pool->open);
  atomic_store(&pool->done, 0);
  atomic_store(&pool->open, pool->base + (alone ? alone : pool->threads));
  if (pool->threads > 1) next_turn(pool);
  for (int spins = 0; !atomic_load(&pool->done);)
    if (claim(pool, 0)) spins = 0;
    else relax(&spins);
#ifdef CHECKED
  return atomic_exchange(&outside, 0);
#else
  return 0;
#endif
}

int lanes(void) { return LANES; }
