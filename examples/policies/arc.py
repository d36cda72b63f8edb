"""Eviction by an adaptive balance of recency and frequency (ARC).

hicache run cache.policy=examples.policies.arc:Arc
"""

from collections import OrderedDict, defaultdict


class Arc:
    """Lists 0 and 1 of a tier and kind hold data without and with a hit, ghosts what left them."""

    def __init__(self, world):
        self.capacity = world.capacity
        self.lists = defaultdict(lambda: (OrderedDict(), OrderedDict()))
        self.ghosts = defaultdict(lambda: (OrderedDict(), OrderedDict()))
        self.pages = defaultdict(lambda: [0, 0])  # of each list
        self.target = defaultdict(float)  # pages that list 0 may keep

    def put(self, entry, place, which):
        self.lists[place][which][entry] = None
        self.pages[place][which] += entry.count

    def on_insert(self, entry, tier):
        place, which = (tier, entry.kind), 0
        for ghost, sign in ((0, 1), (1, -1)):
            if self.ghosts[place][ghost].pop(entry.key, None):
                most, which = self.capacity[tier][entry.kind] or 0, 1
                self.target[place] = min(max(self.target[place] + sign * entry.count, 0), most)
        self.put(entry, place, which)

    def on_hit(self, entry, request):
        for place in [(tier, entry.kind) for tier in entry.tiers]:
            self.take(entry, place)
            self.put(entry, place, 1)

    def on_split(self, entry, first):
        for place in [(tier, entry.kind) for tier in entry.tiers]:
            self.lists[place][entry in self.lists[place][1]][first] = None

    def take(self, entry, place):
        which = entry in self.lists[place][1]
        del self.lists[place][which][entry]
        self.pages[place][which] -= entry.count
        return which

    def on_evict(self, entry, tier, why):
        place = (tier, entry.kind)
        ghosts = self.ghosts[place][self.take(entry, place)]
        ghosts[entry.key] = True
        if len(ghosts) > sum(map(len, self.lists[place])):
            ghosts.popitem(last=False)

    def victim(self, tier, kind, need, queue):
        lists = self.lists[tier, kind]
        order = (0, 1) if self.pages[tier, kind][0] > self.target[tier, kind] else (1, 0)
        return next((each for which in order for each in lists[which] if each in queue), None)
