// The door (rules 9, 16, 17). Two gateways get the same key. The record is in Postgres; whether there is room, and
// whether the machine is online, is known to Redis only.
//
// Ways to refuse:
//   UNDO_ANYWAY   accept first; where the enqueue script refuses, the record is removed again
//   ASK_FIRST     a script is asked before the record exists; from the record on nothing refuses (what we do)
//   UNDO_GUARDED  one script fewer: only the inserter removes, and only while nobody has marked the record as enqueued;
//                 the sweeper marks before it adds; who joins is told 202 only once the job is in Redis
#include "checker.hpp"

enum Way : uint8_t { UNDO_ANYWAY, ASK_FIRST, UNDO_GUARDED };
enum Gateway : uint8_t { IDLE, ASKED, INSERTED, JOINED, REFUSED, DONE };
enum Told : uint8_t { NOTHING, ACCEPTED, NO };

struct Door {
  struct State {
    uint8_t record, queued, marked;
    uint8_t sweeping;  // the sweeper has seen the open record and has not enqueued yet
    uint8_t room;
    uint8_t gateway[2], told[2];
    uint8_t room_changes, crashes;  // left
  };

  struct Options {
    Way way = ASK_FIRST;
  } o;

  State first() const {
    State s{};
    s.room = 1;
    s.room_changes = 2;
    s.crashes = 1;
    return s;
  }

  void canonical(State&) const {}

  void next(const State& s, Steps<State>& out) const {
    if (s.room_changes)
      out.step(FAULT, "room in the queue, machine online: now %d", !s.room, [&](State& n) {
        n.room = !s.room;
        n.room_changes--;
      });
    for (int g = 0; g < 2; g++) submit(s, g, out);
    if (s.record && !s.queued && !s.sweeping)
      out.step(PROMPT, "sweeper: takes the open record", [&](State& n) {
        n.sweeping = 1;
        if (o.way == UNDO_GUARDED) n.marked = 1;
      });
    if (s.sweeping)
      out.step(PROMPT, "sweeper: enqueues it", [&](State& n) {
        n.sweeping = 0;
        n.queued = 1;
      });
  }

  void submit(const State& s, int g, Steps<State>& out) const {
    const uint8_t at = s.gateway[g];
    auto answer = [&](State& n, Told told) {
      n.told[g] = told;
      n.gateway[g] = DONE;
    };
    if (at == IDLE && o.way == ASK_FIRST)
      out.step(PROMPT,
               s.record ? "gateway %d: would refuse, but finds the key's record"
               : s.room ? "gateway %d: asks: there is room"
                        : "gateway %d: asks: refused",
               g + 1, [&](State& n) {
                 if (s.record || s.room)
                   n.gateway[g] = ASKED;
                 else
                   answer(n, NO);
               });
    if (at == (o.way == ASK_FIRST ? ASKED : IDLE))
      out.step(PROMPT, s.record ? "gateway %d: record exists: joins" : "gateway %d: inserts the record", g + 1,
               [&](State& n) {
                 n.record = 1;
                 n.gateway[g] = s.record ? JOINED : INSERTED;
               });
    if (at == JOINED && (o.way != UNDO_GUARDED || s.queued))
      out.step(PROMPT, "gateway %d: answers 202", g + 1, [&](State& n) { answer(n, ACCEPTED); });
    if (at == JOINED && o.way == UNDO_GUARDED && !s.record)
      out.step(PROMPT, "gateway %d: the record it joined is gone: starts over", g + 1,
               [&](State& n) { n.gateway[g] = IDLE; });
    if (at == INSERTED) {
      if (s.room || o.way == ASK_FIRST || (o.way == UNDO_GUARDED && s.queued))
        out.step(PROMPT, "gateway %d: enqueues it (or finds it), answers 202", g + 1, [&](State& n) {
          n.queued = 1;
          answer(n, ACCEPTED);
        });
      else
        out.step(PROMPT, "gateway %d: enqueue script refuses", g + 1, [&](State& n) { n.gateway[g] = REFUSED; });
    }
    if (at == REFUSED)
      out.step(PROMPT, "gateway %d: removes the record (if it may), answers", g + 1, [&](State& n) {
        const bool too_late = o.way == UNDO_GUARDED && s.marked;
        if (!too_late) n.record = 0;
        answer(n, too_late ? ACCEPTED : NO);
      });
    if (at != IDLE && at != DONE && s.crashes)
      out.step(FAULT, "gateway %d DIES", g + 1, [&](State& n) {
        n.gateway[g] = DONE;
        n.crashes--;
      });
  }

  Claims<State> claims() const {
    return {
        {
            {"whoever was told 202 has a record",
             [](const State& s) { return s.record || (s.told[0] != ACCEPTED && s.told[1] != ACCEPTED); }},
            {"nothing is queued for a key without a record", [](const State& s) { return s.record || !s.queued; }},
        },
        [](const State& s) { return s.gateway[0] == DONE && s.gateway[1] == DONE && (!s.record || s.queued); },
        true,
    };
  }
};

using O = Door::Options;

const std::vector<Variant<Door>> VARIANTS = {
    {"ask-first", holds(280), [](O&) {}},
    {"undo-guarded", holds(276), [](O& o) { o.way = UNDO_GUARDED; }},
    {"X-undo-anyway", breaks("whoever was told 202 has a record", 244), [](O& o) { o.way = UNDO_ANYWAY; }},
};

int main(int argc, char** argv) { return run_variants(argc, argv, VARIANTS); }
