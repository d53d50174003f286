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
  int threads, stop;
  pid_t process;
  pthread_t *thread;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  atomic_int turn, done, sleeping, arrived;
  const job_t *job;
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
static void steps(pool_t *pool, const job_t *job, const call_t *call, int me, int part, int end, int *meetings) {
#ifdef CHECKED
  lowest = call->arena, highest = call->arena + job->bytes;
#endif
  for (int i = 0; i < job->count; i++) {
    const double began = job->seconds && me == 0 ? now() : 0;
    runs[job->steps[i].kind](&job->steps[i], call, part, end);
    if (job->steps[i].moves) frame(&job->steps[i], call, part, end);
    if (meetings) {  // the threads share this step: none goes on before all have done their part
      atomic_fetch_add(&pool->arrived, 1);
      ++*meetings;
      for (int spins = 0; atomic_load(&pool->arrived) < *meetings * pool->threads;) relax(&spins);
    }
    if (job->seconds && me == 0) job->seconds[i] += now() - began;
  }
}

// As many rounds as there are, each thread takes a chunk of its own; the rest is shared step by step.
static void work(pool_t *pool, const job_t *job, int me) {
  const int64_t chunks = (job->items + job->chunk - 1) / job->chunk, alone = chunks - chunks % pool->threads;
  int meetings = 0;
  for (int64_t c = 0; c < chunks; c++) {
    const int64_t first = c * job->chunk, left = job->items - first;
    call_t call = {job->arena, job->inputs, job->outputs, first, (int32_t)(left < job->chunk ? left : job->chunk), job->vectors};
    if (c >= alone) {
      const int together = pool->threads > 1;
      steps(pool, job, &call, me, me, me + 1, together ? &meetings : NULL);
    } else if (c % pool->threads == me) {
      call.arena += me * job->bytes;
      steps(pool, job, &call, me, 0, pool->threads, NULL);
    }
    if (c + 1 == alone && alone < chunks) {  // the arena of the first thread is free when it has finished
      atomic_fetch_add(&pool->arrived, 1);
      meetings++;
      for (int spins = 0; atomic_load(&pool->arrived) < meetings * pool->threads;) relax(&spins);
    }
  }
}
static void *worker(void *seat) {
  pool_t *pool = ((seat_t *)seat)->pool;
  const int me = ((seat_t *)seat)->me;
  free(seat);
  for (int seen = 0;; seen++) {
    for (int spins = 0; atomic_load(&pool->turn) == seen && spins < 4000;) relax(&spins);
    if (atomic_load(&pool->turn) == seen) {
      pthread_mutex_lock(&pool->lock);
      while (atomic_load(&pool->turn) == seen) pthread_cond_wait(&pool->wake, &pool->lock);
      pthread_mutex_unlock(&pool->lock);
    }
    if (pool->stop) return NULL;
    work(pool, pool->job, me);
    atomic_fetch_add(&pool->done, 1);
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
    pool->stop = 1;
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
  atomic_store(&pool->done, 0);
  atomic_store(&pool->arrived, 0);
  if (pool->threads > 1) next_turn(pool);
  work(pool, job, 0);
  for (int spins = 0; atomic_load(&pool->done) < pool->threads - 1;) relax(&spins);
#ifdef CHECKED
  return atomic_exchange(&outside, 0);
#else
  return 0;
#endif
}

int lanes(void) { return LANES; }
