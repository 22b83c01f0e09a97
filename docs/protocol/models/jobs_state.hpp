// The job path (rules 1 to 19). One unhinted job under one idempotency key, submitted at two gateways; two workers; up
// to four sessions of one or two machines of the user; the record in Postgres, the stream in Redis, sweeper, deadline.
// The stream has room for two entries, so that a second one for the same job can be seen to do harm.
//
// Assert and read are one step here and a claim another; window.hpp has calls and answers apart, and `serve.lua`.
#pragma once

#include "checker.hpp"

enum Outcome : uint8_t { NO_OUTCOME, COMPLETED, UNKNOWN, EXPIRED, UNDELIVERABLE };
enum Record : uint8_t { NO_RECORD, QUEUED, BEGUN, TERMINAL };
enum Entry : uint8_t { NO_ENTRY, UNREAD, PENDING };
enum Gateway : uint8_t { IDLE, INSERTED, WAITING, ANSWERED, DEAD, JOINED, REGISTERED };
enum Worker : uint8_t { DOWN, UP, FROZEN };
enum Row : uint8_t { NO_ROW, RUNNING, ROW_COMPLETED, ROW_UNKNOWN };
enum Phase : uint8_t { LIVE = 1, HALF_OPEN, CLOSED };

constexpr int ENTRIES = 2;
constexpr int GATEWAYS = 2;
constexpr int SESSIONS_MAX = 4;
constexpr uint8_t COUNT_MAX = 9;

struct JobsState {
  struct Session {
    uint8_t phase, worker, machine;
    uint8_t has_claimed;
    uint8_t held, marked, sent;  // bit sets of entries
    uint8_t frame, result;       // on the socket; result: an outcome
    uint8_t unwritten;           // outcome that waits for Postgres
    uint8_t to_settle;           // outcome that is durable
  };
  struct State {
    // Postgres
    uint8_t postgres_up, record, outcome, replaced, begun_on, marks;
    // Redis
    uint8_t entry[ENTRIES], owner[ENTRIES], deliveries;
    uint8_t result, waiters, reply[GATEWAYS], stored;  // stored: the newest session that has asserted
    uint8_t gateway[GATEWAYS], told[GATEWAYS];
    uint8_t worker[3];
    // machines, from 1
    uint8_t up[3], row[3], running[3], joined[3], forgot[3];
    uint8_t executions, ever_sent;
    uint8_t sessions, sweeping;
    uint8_t late, deadline_plan, deadline_owes_settle;
    uint8_t faults, drops, worker_kills, kills, freezes, flushes, outages, gateway_kills, losses;  // left
    Session session[SESSIONS_MAX + 1];
  };

  struct Options {
    int machines = 1, gateways = 2;
    int faults = 2, drops = 1, worker_kills = 1, kills = 1, freezes = 1, flushes = 1, outages = 1, gateway_kills = 1;
    int losses = 0;  // of journal rows
    int limit = 0;   // of begin marks; 0: not modelled
    bool poison = false;
    bool record_guarded = true;    // rule 1
    bool record_published = true;  // rule 2
    bool begin_mark = true;        // rule 3; else the deadline looks into Redis
    bool withdraw_before_expiry =
        true;                       // without marks: the deadline removes what nobody has read, and only then decides
    bool pinned_to_machine = true;  // rule 4
    bool horizon = true;            // rule 7
    bool settle_by_anyone = true;   // rule 11
    bool finish_fenced = true;      // the finish script refuses an old epoch (rule 11 needs it not)
    bool fenced_read = true;        // rule 12; else blocking reads take
    bool claims_again = true;       // whatever others hold, whenever it is seen
    bool claims_when_epoch_raised = false;                               // rule 13; else at the session's start only
    bool reads_record_after_registering = true, rereads_records = true;  // rule 15
    bool enqueue_idempotent = true;                                      // rule 16
    bool sweeper = true;
    bool running_is_no_poison = true, poison_is_unknown = true;  // rule 18
    bool unasked_outcomes = false;  // the machine sends stored outcomes on a new socket (rule 19)
    bool no_group = false;          // whoever thinks it has a live session reads all outstanding entries; nothing moves
    bool machine_returns = true;
  } o;

  State first() const {
    State s{};
    s.postgres_up = 1;
    s.worker[1] = s.worker[2] = UP;
    s.up[1] = 1;
    s.up[2] = o.machines > 1;
    s.faults = o.faults;
    s.drops = o.drops;
    s.worker_kills = o.worker_kills;
    s.kills = o.kills;
    s.freezes = o.freezes;
    s.flushes = o.flushes;
    s.outages = o.outages;
    s.gateway_kills = o.gateway_kills;
    s.losses = o.losses;
    if (o.gateways == 1) s.gateway[1] = DEAD;
    return s;
  }

  // What nobody can look at any more is zeroed.
  void canonical(State& n) const {
    for (int i = 1; i <= n.sessions; i++) {
      Session& c = n.session[i];
      if (c.phase != CLOSED || c.unwritten || c.to_settle) continue;
      c = {};
      c.phase = CLOSED;
    }
    for (int e = 0; e < ENTRIES; e++) {
      if (n.entry[e] != PENDING || !n.owner[e]) continue;
      const Session& c = n.session[n.owner[e]];
      if (c.phase == CLOSED && !c.to_settle && !c.unwritten) n.owner[e] = 0;
    }
    if (!o.limit) n.deliveries = n.marks = 0;
    bool asking = false;
    for (int g = 0; g < GATEWAYS; g++) {
      if (n.gateway[g] != ANSWERED && n.gateway[g] != DEAD)
        asking = true;
      else
        n.reply[g] = 0;
    }
    if (!asking) n.result = 0;
    if (!n.faults)
      n.drops = n.worker_kills = n.kills = n.freezes = n.flushes = n.outages = n.gateway_kills = n.losses = 0;
  }

  static bool may(const State& s, uint8_t State::* budget) { return s.*budget && s.faults; }
  static void use(State& n, uint8_t State::* budget) {
    n.*budget -= 1;
    n.faults--;
  }

  // ---- helpers

  static bool is_open(const State& s) { return s.record == QUEUED || s.record == BEGUN; }
  static bool is_queued(const State& s) { return s.entry[0] || s.entry[1]; }
  static bool has_others(const State& s, int i) {
    for (int e = 0; e < ENTRIES; e++)
      if (s.entry[e] == PENDING && s.owner[e] != i) return true;
    return false;
  }

  void enqueue(State& n) const {
    if (o.enqueue_idempotent && is_queued(n)) return;
    for (int e = 0; e < ENTRIES; e++)
      if (!n.entry[e]) {
        n.entry[e] = UNREAD;
        n.owner[e] = 0;
        return;
      }
  }
  static void remove_all(State& n) { memset(n.entry, 0, ENTRIES), memset(n.owner, 0, ENTRIES); }
  static void publish(State& n, uint8_t outcome) {
    for (int g = 0; g < GATEWAYS; g++)
      if (n.waiters >> g & 1) n.reply[g] = outcome;
    n.waiters = 0;
    n.result = outcome;
  }
  void end_record(State& n, uint8_t outcome) const {
    if (o.record_guarded && n.record == TERMINAL) return;
    if (n.record == TERMINAL && n.outcome != outcome) n.replaced = 1;
    n.record = TERMINAL;
    n.outcome = outcome;
  }
  static void count(uint8_t& counter) {
    if (counter < COUNT_MAX) counter++;
  }
  static void forget(Session& c) { c.held = c.marked = c.sent = 0; }
  static void lose_socket(State& n, int i) {
    n.session[i].frame = n.session[i].result = 0;
    for (int m = 1; m <= 2; m++) n.joined[m] &= ~(1 << i);
  }

  // ---- claims

  static constexpr const char* ONCE = "at most one execution";
  static constexpr const char* ONE_END = "one terminal state, never replaced";
  static constexpr const char* TOLD_THE_RECORD = "every caller is told the record's outcome";
  static constexpr const char* DID_NOT_RUN = "expired and undeliverable only if it never ran";

  Claims<State> claims() const {
    return {
        {
            {ONCE, [](const State& s) { return s.executions <= 1; }},
            {ONE_END, [](const State& s) { return !s.replaced; }},
            {TOLD_THE_RECORD,
             [](const State& s) {
               for (int g = 0; g < GATEWAYS; g++)
                 if (s.gateway[g] == ANSWERED && s.told[g] != s.outcome) return false;
               return true;
             }},
            {DID_NOT_RUN,
             [](const State& s) {
               return s.record != TERMINAL || (s.outcome != EXPIRED && s.outcome != UNDELIVERABLE) || !s.executions;
             }},
            {"completed only if it ran",
             [](const State& s) { return s.record != TERMINAL || s.outcome != COMPLETED || s.executions; }},
        },
        // It has ended, Redis holds nothing of it, and nobody waits.
        [](const State& s) {
          if (s.record == NO_RECORD) return true;
          if (s.record != TERMINAL || is_queued(s)) return false;
          return std::none_of(s.gateway, s.gateway + GATEWAYS, [](uint8_t at) {
            return at == INSERTED || at == WAITING || at == JOINED || at == REGISTERED;
          });
        },
        true,
    };
  }
};
