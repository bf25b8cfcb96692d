"""The paper's central claim at laptop scale: `paravt paradox` runs its arms and draws what came of them."""
